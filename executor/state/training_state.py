"""Parameters and optimizer state of a run, in the flat tensors of the schedule."""

from collections.abc import Iterator, Mapping

import torch

from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.staging import Staging
from twinstream.executor.providers.registry import provider_of
from twinstream.executor.weights.base_cache import in_base
from twinstream.models.layout import FlatLayout
from twinstream.models.lowering.declarations import optimizer_parts, part_state_bytes
from twinstream.models.providers.model import AnyModel
from twinstream.models.providers.trained import adapter_groups, layout_of, trained_groups
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.derived.flush import is_state
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.tensors import DISK

State = dict[str, torch.Tensor]

STEP = "step"


def initial_state(spec: AnyModel, seed: int, recipe: Recipe | None = None) -> State:
    """Fresh parameters (normal, std 0.02; norms one; biases zero; of a traced module those that its
    own code draws) and fresh optimizer state.

    Keys are `param.GROUP` and `opt.GROUP`, with GROUP `embedding`, a layer number, `head`, or
    `lora.LAYER`; values 1-D uint8. What the recipe freezes has no `opt`. The same seed gives the
    same bits on every machine, those of the base whether there are adapters or not.
    """
    recipe = recipe or Recipe()
    trained = trained_groups(spec, recipe)
    state: State = {}
    for group, flat in provider_of(spec).fresh(spec, seed):
        state[f"param.{group}"] = in_base(spec, recipe, group, flat)
        if group in trained:
            state[f"opt.{group}"] = fresh_optimizer_state(spec, group, flat, recipe)
    return state | adapter_state(spec, seed, recipe)


def adapter_state(spec: AnyModel, seed: int, recipe: Recipe) -> State:
    """Fresh adapters and their optimizer state, to go with a base that is there already.

    A is uniform within 1 / sqrt(in_features), which is PEFT's default, and B zero: the model is the
    base until the first update. Empty where the recipe has no adapters.
    """
    state: State = {}
    for group, flat in fresh_adapters(spec, seed, recipe):
        state[f"param.{group}"] = flat
        state[f"opt.{group}"] = fresh_optimizer_state(spec, group, flat, recipe)
    return state


def fresh_adapters(spec: AnyModel, seed: int, recipe: Recipe) -> Iterator[tuple[str, torch.Tensor]]:
    """Each group of flat adapters in turn, as `adapter_state` has them."""
    generator = torch.Generator().manual_seed(seed)
    for group in adapter_groups(spec, recipe):
        layout = layout_of(spec, recipe, group)
        yield group, _drawn_adapters(layout, DTYPES[spec.dtype], generator)


def steps_done(state: Mapping[str, torch.Tensor]) -> int:
    """Return how many optimizer steps a state has behind it; 0 of one that does not say so.

    Raises:
        TwinstreamError: what it says is no whole number.
    """
    stored = state.get(STEP)
    if stored is None:
        return 0
    if stored.numel() != 1 or stored.is_floating_point() or stored.item() < 0:
        raise TwinstreamError(
            f"the state's '{STEP}' is {stored}; it counts the steps done: torch.tensor(3)"
        )
    return int(stored.item())


def with_steps_done(state: State, num_steps: int) -> State:
    """The state, saying how many optimizer steps it has behind it."""
    return state | {STEP: torch.tensor(num_steps)}


def fill_carried(schedule: RankSchedule, arenas: Arenas, state: Mapping[str, torch.Tensor]) -> None:
    """Put the state into every carried slot, once before the first pass.

    Raises:
        TwinstreamError: the state lacks a carried tensor, or has it at another size.
    """
    staging = Staging()
    for tensor, slot, source in _carried(schedule, state):
        arenas.put(tensor, slot, source, staging)


def read_carried(
    schedule: RankSchedule, arenas: Arenas, state: Mapping[str, torch.Tensor]
) -> State:
    """The state after the last pass, shaped as the one given."""
    result = {name: flat.clone() for name, flat in state.items()}
    staging = Staging()
    for tensor, slot, destination in _carried(schedule, result):
        staging.copy(destination, arenas.view(tensor, slot))
    return result


def carried_names(schedule: RankSchedule) -> tuple[str, ...]:
    """The whole tensors of the state, which a schedule carries from step to step: `param.0`, ...

    Not those that only wait for an update: with the flush of the schedule there are none of them.
    """
    tensors = {t.tensor_id: t for t in schedule.tensors}
    carried = [tensors[item.tensor] for item in schedule.carried]
    return tuple(dict.fromkeys(t.parent or t.tensor_id for t in carried if is_state(t)))


def put_carried(
    schedule: RankSchedule,
    arenas: Arenas,
    name: str,
    flat: torch.Tensor,
    staging: Staging | None = None,
) -> None:
    """Put one whole tensor, 1-D uint8, into every slot that carries it or a part of it; what a
    file has is there.

    Of several that follow one another `staging` has the copies overlap.
    """
    staging = staging or Staging()
    for tensor, slot, source in _carried(schedule, {name: flat}, name):
        arenas.put(tensor, slot, source, staging)


def take_carried(
    schedule: RankSchedule, arenas: Arenas, name: str, start: int = 0, stop: int | None = None
) -> torch.Tensor:
    """Bytes of one whole tensor as its slots have it, 1-D uint8 on the host.

    Where they lie together on the host they are a view of it, which holds while nothing runs.

    Args:
        start, stop: the first byte, and the one after the last; all of them by default.
    """
    tensors = {tensor.tensor_id: tensor for tensor in schedule.tensors}
    end = tensors[name].size_bytes if stop is None else stop
    inside: list[tuple[int, torch.Tensor]] = []  # where in the range bytes belong
    elsewhere = {item.tensor for item in schedule.carried if arenas.tier(item.slot) != DISK}
    for item in schedule.carried:
        if arenas.tier(item.slot) == DISK and item.tensor in elsewhere:
            continue
        tensor = tensors[item.tensor]
        if (tensor.parent or item.tensor) != name:
            continue
        low = max(start, tensor.offset_bytes)
        high = min(end, tensor.offset_bytes + tensor.size_bytes)
        if low < high:
            first = tensor.offset_bytes
            view = arenas.part(item.tensor, item.slot, low - first, high - first)
            if view.numel() == end - start and not view.is_cuda:
                return view
            inside.append((low - start, view))
    flat, staging = torch.zeros(end - start, dtype=torch.uint8), Staging()
    for at, view in inside:
        staging.copy(flat[at : at + view.numel()], view)
    return flat


def _carried(
    schedule: RankSchedule, state: Mapping[str, torch.Tensor], name: str | None = None
) -> list[tuple[str, str, torch.Tensor]]:
    """(tensor, slot, its bytes in the state) of all state carried, or of one whole tensor."""
    tensors = {t.tensor_id: t for t in schedule.tensors}
    found = []
    for item in schedule.carried:
        tensor = tensors[item.tensor]
        root = tensors[tensor.parent or item.tensor]
        if not is_state(root) or (name is not None and root.tensor_id != name):
            continue
        flat = state.get(root.tensor_id)
        if flat is None or flat.numel() != root.size_bytes:
            given = "nothing" if flat is None else f"{flat.numel()} bytes"
            raise TwinstreamError(
                f"the schedule carries '{root.tensor_id}' with {root.size_bytes} bytes, but the "
                f"state has {given} for it; was it made for another model or dtype?"
            )
        end = tensor.offset_bytes + tensor.size_bytes
        found.append((item.tensor, item.slot, flat[tensor.offset_bytes : end]))
    return found


def _drawn_adapters(
    layout: FlatLayout, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    flat = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for inner in layout.tensors:
        if inner.name.endswith(("_a", ".lora_A.weight")):
            view = flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes].view(dtype)
            random, bound = torch.empty(view.numel()), float(inner.shape[-1]) ** -0.5
            view.copy_(random.uniform_(-bound, bound, generator=generator))
    return flat


def fresh_optimizer_state(
    spec: AnyModel, group: str, parameters: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Zero m and v of each part of a group and, where the recipe has it, its float32 master.

    With a master each part's state is m, v, master, as many float32 values each as it has
    parameters. Zero codes and scales of an 8-bit state are zero, too.
    """
    kind, values = recipe.state_of(spec.dtype), parameters.view(DTYPES[spec.dtype])
    parts = optimizer_parts(spec, group, recipe)
    size = sum(part_state_bytes(spec, group, part, recipe) for part in parts)
    state = torch.zeros(size, dtype=torch.uint8)
    if kind == "float32_master":
        for part in parts:
            start, count = part.element_offset, part.num_elements
            all_masters = state.view(torch.float32)
            master = all_masters[3 * start + 2 * count : 3 * (start + count)]
            master.copy_(values[start : start + count])
    return state
