"""Loss and gradients of a traced model, by the executor and by the module's own backward."""

import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.traced.families import tiny_config
from twinstream.executor.kernels import registry
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.modules.blocks import blocks_of
from twinstream.executor.modules.building import build_module
from twinstream.executor.modules.tracing import trace
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import initial_state
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.traced import ModuleSource, TracedModel
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.simulator.replay import steady_state

BATCH, SEQ_LEN = 2, 32
RECIPE = Recipe(kernels=KernelChoice())


_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_TIMES = 3


def traced(family: str) -> TracedModel:
    """A tiny model of a family, of three times the layers of the table where that is possible."""
    shallow = tiny_config(family)
    try:
        return trace(ModuleSource(config=_deeper(shallow)), dtype="float32", seq_len=SEQ_LEN)
    except (TwinstreamError, ValueError, IndexError, KeyError, RuntimeError):
        return trace(ModuleSource(config=shallow), dtype="float32", seq_len=SEQ_LEN)


def _deeper(config: dict[str, Any]) -> dict[str, Any]:
    """With more layers; lists that have an item for each are repeated."""
    (name, *_) = [name for name in _NUM_LAYERS if name in config]
    layers = config[name]
    repeated = {
        key: value * _TIMES
        for key, value in config.items()
        if isinstance(value, list) and len(value) == layers
    }
    return config | repeated | {name: layers * _TIMES}


@dataclass(frozen=True)
class Step:
    """Ids and labels [B, S] of a step of one chunk; a label below 0 does not count."""

    ids: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, model: TracedModel, seed: int = 1) -> "Step":
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.vocab_size, (BATCH, SEQ_LEN), generator=generator)
        labels = torch.full_like(ids, -1)
        labels[:, :-1] = ids[:, 1:]
        return cls(ids, labels)

    @property
    def num_targets(self) -> int:
        return int((self.labels >= 0).sum())

    def fed(self, step: int, index: int) -> torch.Tensor:
        return torch.stack([self.ids.reshape(-1), self.labels.reshape(-1)]).int()


def planned(
    model: TracedModel, policy: str = "optimal", device_mem: int | None = None, **how: Any
) -> RankSchedule:
    """A step of one chunk."""
    step = TrainingStep(SEQ_LEN, BATCH * SEQ_LEN, BATCH * SEQ_LEN, 1, recipe=RECIPE)
    request = PlanRequest.of(model, "cpu", step=step, policy=policy, device_mem=device_mem, **how)
    return Planner(steady_state).plan(request).only


def state_bytes(model: TracedModel) -> int:
    """Of parameters and optimizer state."""
    return 3 * sum(model.group_layout(group).size_bytes for group in model.parameter_groups)


def least_schedule(model: TracedModel) -> tuple[RankSchedule, float]:
    """A schedule for the smallest of some shares of the state that it fits, and that share."""
    beside = planned(model).caps.library_bytes or 0
    for share in (0.25, 0.35, 0.5, 0.75, 1.0):
        try:
            return planned(model, device_mem=round(share * state_bytes(model)) + beside), share
        except InfeasiblePlan:
            continue
    return planned(model), 2.0


def loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, model: TracedModel, schedule: RankSchedule, step: Step,
) -> tuple[float, dict[str, torch.Tensor]]:  # fmt: skip
    """Of the executor; gradients are caught as the updates find them."""
    caught: dict[tuple[int, int], torch.Tensor] = {}
    update = registry._COMPOSITIONS["adamw_step"]

    def catching(operands: Any, attributes: Any, vector: Any, calls: Calls) -> None:
        flat, key = operands["gradients"].bytes, (attributes["tensor_seed"],
                                                  attributes["element_offset"])  # fmt: skip
        calls.add(lambda: caught.__setitem__(key, flat.clone()))
        update(operands, attributes, vector, calls)

    monkeypatch.setitem(registry._COMPOSITIONS, "adamw_step", catching)
    training = Training(step.fed, 1e-3, 0, num_targets=lambda number: step.num_targets)
    options = RunOptions(num_passes=1, poison=True)
    execute(schedule, initial_state(model, 0, RECIPE), training.host_work(schedule), options)
    found = {}
    for group in set(model.parameter_groups) - set(model.untrained_groups):
        seed = zlib.crc32(f"param.{group}".encode())
        parts = sorted(key for key in caught if key[0] == seed)
        flat = torch.cat([caught[key] for key in parts]).view(torch.float32)
        for inner in model.group_layout(group).tensors:
            start = inner.offset_bytes // 4
            found[inner.name] = flat[start : start + inner.size_bytes // 4].view(inner.shape)
    return training.losses[0], found


def reference(
    model: TracedModel, step: Step, *, seeded: bool = False
) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Of the module's own forward and backward, in one thread as the executor's kernels.

    Args:
        seeded: random numbers are drawn as of the first step of a run with seed 0.
    """
    module = build_module(model.source, torch.float32, model.attention, with_parameters=True)
    parameters = dict(module.named_parameters())
    state = initial_state(model, 0, RECIPE)
    with torch.no_grad():
        for group in model.parameter_groups:
            flat = state[f"param.{group}"].view(torch.float32)
            for inner in model.group_layout(group).tensors:
                start = inner.offset_bytes // 4
                values = flat[start : start + inner.size_bytes // 4]
                parameters[inner.name].copy_(values.view(inner.shape))
    if seeded:
        torch.manual_seed(_seed_of(0))
        for layer, block in enumerate(blocks_of(module)[1]):
            block.register_forward_pre_hook(lambda *_, _at=layer + 1: _seed(_at))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        logits = module(input_ids=step.ids).logits
        labels = step.labels.reshape(-1).masked_fill(step.labels.reshape(-1) < 0, -100)
        total = torch.nn.functional.cross_entropy(
            logits.float().reshape(-1, logits.shape[-1]), labels, reduction="sum"
        )
        loss = total * torch.tensor(1.0 / step.num_targets)
        loss.backward()
    finally:
        torch.set_num_threads(before)
    return loss.item(), {name: one.grad for name, one in parameters.items()}


def _seed(place: int) -> None:
    torch.manual_seed(_seed_of(place))


def _seed_of(place: int) -> int:
    return zlib.crc32(f"0 1 {place}".encode())


def differences(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor | None]
) -> list[str]:
    """Names of parameters whose gradients are not the same bits."""
    return [
        name
        for name, gradient in expected.items()
        if not (
            torch.equal(found[name], gradient)
            if gradient is not None
            else not found.get(name, torch.zeros(1)).any()
        )
    ]
