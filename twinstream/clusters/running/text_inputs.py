"""What a rank that trains on text begins with: fresh weights of its own, and its replica's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twinstream.clusters.executable import sharding_of
from twinstream.clusters.layout import Layout
from twinstream.data.text import TextBatches
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.cluster.projecting import RankPart

if TYPE_CHECKING:
    from twinstream.executor.ranks.rank_run import RankInputs
    from twinstream.executor.run.training import TokenSource
    from twinstream.executor.state.training_state import State


@dataclass(frozen=True)
class TextInputs:
    """Makes a rank's inputs in its process, from its part of the schedule.

    Of a step's chunks the first replica has the first, the next one those that follow; so all
    replicas together train on what one device would. Of sharded state a rank has its shards.
    """

    spec: ModelSpec
    layout: Layout
    tokens: NDArray[np.int32]
    learning_rate: float
    seed: int

    def __call__(self, part: RankPart) -> RankInputs:
        from twinstream.executor.ranks.rank_run import RankInputs
        from twinstream.executor.run.training import Training

        own = part.schedule.workload
        whole = own.model_copy(update={"rounds_per_step": own.rounds_per_step * self.layout.dp})
        batches = TextBatches(self.tokens, whole)
        before = part.coordinates.get("dp", 0) * own.chunks_per_round * own.rounds_per_step

        training = Training(
            _source(batches, before), self.learning_rate, self.seed,
            num_targets=lambda step: whole.tokens_per_step,
        )  # fmt: skip
        return RankInputs(training.host_work(part.schedule), self._state(part))

    def _state(self, part: RankPart) -> State:
        """Of the groups that the rank carries; the bits are those of the whole model's state."""
        from twinstream.executor.state.sharded_state import ShardedState
        from twinstream.executor.state.training_state import (
            carried_names,
            fresh_optimizer_state,
            fresh_parameters,
        )

        recipe = Recipe.model_validate(part.schedule.recipe)
        names = set(carried_names(part.schedule))
        state: State = {}
        for group, flat in fresh_parameters(self.spec, self.seed):
            if f"param.{group}" in names:
                state[f"param.{group}"] = flat
            if f"opt.{group}" in names:
                state[f"opt.{group}"] = fresh_optimizer_state(self.spec, group, flat, recipe)
        sharding = sharding_of(self.layout)
        if sharding is None:
            return state
        return ShardedState(self.spec, recipe, sharding).shard(state, part.coordinates["dp"])


def _source(batches: TextBatches, before: int) -> TokenSource:
    """Chunks of a step from the one after so many."""
    import torch

    def chunk(step: int, index: int) -> Any:
        return torch.from_numpy(batches.chunk(step, before + index))

    return chunk
