"""Where the state of a run comes from: drawn, read from folders, or a checkpoint.

Everything comes a group at a time, so that no second copy of the state is held.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from twinstream.executor.kernels.codes import decoded
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.staging import Staging
from twinstream.executor.state.training_state import (
    fresh_adapters,
    fresh_optimizer_state,
    fresh_parameters,
    in_base,
    put_carried,
)
from twinstream.executor.weights.base_cache import BaseCache
from twinstream.executor.weights.checkpoint_files import CheckpointFiles
from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.executor.weights.peft.peft_folder import PeftFolder
from twinstream.models.kernel_costs.scratch_sizes import code_blocks, state_bytes
from twinstream.models.lowering.declarations import optimizer_parts
from twinstream.models.model import AnyModel, model_of
from twinstream.models.recipe import OptimizerState, Recipe
from twinstream.models.trained import adapter_groups, layout_of, trained_groups
from twinstream.schedule.document import Schedule

Weights = Iterable[tuple[str, torch.Tensor]]
"""Name and flat parameters of group after group, 1-D uint8 on the host."""
Tell = Callable[[str], None]
Optimizer = Callable[[str, torch.Tensor], torch.Tensor]
"""Of a trained group and its flat parameters, the optimizer's state, 1-D uint8 on the host."""


def fill_from(schedule: Schedule, arenas: Arenas, weights: Weights, optimizer: Optimizer) -> None:
    """Put a state into every carried slot; what is frozen has no optimizer state.

    Raises:
        WeightsError: a file has gone or changed.
    """
    recipe = Recipe.model_validate(schedule.recipe)
    trained = set(trained_groups(model_of(schedule.model), recipe))
    staging = Staging()
    for group, flat in weights:
        put_carried(schedule, arenas, f"param.{group}", flat, staging)
        if group in trained:
            put_carried(schedule, arenas, f"opt.{group}", optimizer(group, flat), staging)


def fill_fresh(schedule: Schedule, arenas: Arenas, seed: int) -> None:
    """Put what `initial_state` has into every carried slot."""
    spec, recipe = model_of(schedule.model), Recipe.model_validate(schedule.recipe)
    weights = chain(fresh_parameters(spec, seed), fresh_adapters(spec, seed, recipe))
    kept = in_their_base(weights, spec, recipe)
    fill_from(schedule, arenas, kept, fresh_optimizer(spec, recipe))


def in_their_base(weights: Weights, spec: AnyModel, recipe: Recipe) -> Weights:
    """The same as the recipe keeps them: frozen blocks in few bits, if it says."""
    return ((group, in_base(spec, recipe, group, flat)) for group, flat in weights)


def read_parameters(
    folder: HfFolder, recipe: Recipe, run: Path | None = None, tell: Tell = lambda line: None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The groups of a Hugging Face folder, as the recipe keeps them.

    Args:
        run: a folder beside which blocks in few bits are kept, once they are made.
        tell: takes a line on those that are made anew.
    """
    kept = None if run is None or recipe.base == "model" else BaseCache(run, folder, recipe, tell)
    for group in folder.spec.parameter_groups:
        make = partial(_read_parameters, folder, recipe, group)
        if kept is None or recipe.base_of(group) == "model":
            yield group, make()
        else:
            yield group, kept.of(group, make)


def _read_parameters(folder: HfFolder, recipe: Recipe, group: str) -> torch.Tensor:
    if recipe.base_of(group) == "nf4" and folder.has_nf4(group):
        return folder.read_nf4(group)
    flat = torch.empty(layout_of(folder.spec, Recipe(), group).size_bytes, dtype=torch.uint8)
    folder.read_group(group, flat)
    return in_base(folder.spec, recipe, group, flat)


def read_adapters(folder: PeftFolder, base: Weights = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The groups of a base with what a PEFT folder has of them, and the folder's adapters."""
    for group, flat in base:
        folder.put_saved(group, flat)
        yield group, flat
    recipe = Recipe(lora=folder.lora)
    for group in adapter_groups(folder.spec, recipe):
        flat = torch.empty(layout_of(folder.spec, recipe, group).size_bytes, dtype=torch.uint8)
        folder.read_group(group, flat)
        yield group, flat


def fresh_optimizer(spec: AnyModel, recipe: Recipe) -> Optimizer:
    """Nothing learned yet."""
    return lambda group, flat: fresh_optimizer_state(spec, group, flat, recipe)


def kept_optimizer(files: CheckpointFiles, spec: AnyModel, was: Recipe, now: Recipe) -> Optimizer:
    """What a checkpoint has; where the run goes on with a float32 master, that is made.

    A master begins as the parameters are; m and v keep their values, in float32.
    """
    kind = was.state_of(spec.dtype)

    def state_of(group: str, flat: torch.Tensor) -> torch.Tensor:
        state = files.read(f"opt.{group}")
        if kind == now.state_of(spec.dtype):
            return state
        assert now.optimizer_state == "float32_master", f"{kind} cannot become another state"
        return _with_master(spec, was, group, flat, state)

    return state_of


def _with_master(
    spec: AnyModel, was: Recipe, group: str, parameters: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """m, v and master of each part, float32, from its state of another kind."""
    values, found = parameters.view(DTYPES[spec.dtype]), []
    kind, begin = was.state_of(spec.dtype), 0
    for part in optimizer_parts(spec, group, was):
        size = state_bytes(kind, spec.dtype, part.num_elements)
        m, v = _moments(state[begin : begin + size], part.num_elements, kind, spec)
        begin += size
        inside = values[part.element_offset : part.element_offset + part.num_elements]
        found += [m, v, inside.float()]
    return torch.cat(found).view(torch.uint8)


def _moments(
    state: torch.Tensor, count: int, kind: OptimizerState, spec: AnyModel
) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "model":
        m, v = state.view(DTYPES[spec.dtype]).view(2, count)
        return m.float(), v.float()
    m, v = state[: 2 * count].view(2, count)
    scales = state[2 * count :].view(torch.float32).view(2, code_blocks(count))
    return decoded(m, scales[0], signed=True), decoded(v, scales[1], signed=False)
