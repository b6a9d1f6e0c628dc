"""Make the first state of a run: drawn, read from folders, or read from a checkpoint.

Everything comes a group at a time, so that no second copy of the state is held.
"""

from collections.abc import Callable
from itertools import chain

import torch

from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.staging import Staging
from twinstream.executor.providers.provider import Weights
from twinstream.executor.providers.registry import provider_of
from twinstream.executor.state.training_state import (
    fresh_adapters,
    fresh_optimizer_state,
    put_carried,
)
from twinstream.executor.weights.base_cache import in_base
from twinstream.executor.weights.checkpoint_files import CheckpointFiles
from twinstream.models.model import AnyModel, model_of
from twinstream.models.recipe import Recipe
from twinstream.models.trained import trained_groups
from twinstream.schedule.document import RankSchedule

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
    weights = chain(provider_of(spec).fresh(spec, seed), fresh_adapters(spec, seed, recipe))
    kept = in_their_base(weights, spec, recipe)
    fill_from(schedule, arenas, kept, fresh_optimizer(spec, recipe))


def in_their_base(weights: Weights, spec: AnyModel, recipe: Recipe) -> Weights:
    """The same as the recipe keeps them: frozen blocks in few bits, if it says."""
    return ((group, in_base(spec, recipe, group, flat)) for group, flat in weights)


def fresh_optimizer(spec: AnyModel, recipe: Recipe) -> Optimizer:
    """Return a source of optimizer state as it is before the first step."""
    return lambda group, flat: fresh_optimizer_state(spec, group, flat, recipe)


def kept_optimizer(files: CheckpointFiles) -> Optimizer:
    """Return a source of the optimizer state that a checkpoint has."""
    return lambda group, _: files.read(f"opt.{group}")
