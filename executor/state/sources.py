"""Make the first state of a run: drawn, read from folders, or read from a checkpoint.

Everything comes a group at a time, so that no second copy of the state is held.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch

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
from twinstream.models.model import AnyModel, model_of
from twinstream.models.recipe import Recipe
from twinstream.models.trained import adapter_groups, layout_of, trained_groups
from twinstream.schedule.document import RankSchedule

Weights = Iterable[tuple[str, torch.Tensor]]
"""Name and flat parameters of group after group, 1-D uint8 on the host."""
Tell = Callable[[str], None]
Optimizer = Callable[[str, torch.Tensor], torch.Tensor]
"""Of a trained group and its flat parameters, the optimizer's state, 1-D uint8 on the host."""


def fill_from(
    schedule: RankSchedule, arenas: Arenas, weights: Weights, optimizer: Optimizer
) -> None:
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


def fill_fresh(schedule: RankSchedule, arenas: Arenas, seed: int) -> None:
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
    """Return a source of optimizer state as it is before the first step."""
    return lambda group, flat: fresh_optimizer_state(spec, group, flat, recipe)


def kept_optimizer(files: CheckpointFiles) -> Optimizer:
    """Return a source of the optimizer state that a checkpoint has."""
    return lambda group, _: files.read(f"opt.{group}")
