"""Run ranks of a cluster's schedule on text: processes of this machine, or one of torchrun's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from twinstream.clusters.conforms import is_executable
from twinstream.clusters.kernel_sets import run_refusal
from twinstream.clusters.pipeline import layout_in
from twinstream.clusters.running.measured import measured_cluster_timeline
from twinstream.data.text import TextBatches, check_vocabulary
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import whole_group
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import Recipe
from twinstream.run_settings import RunSettings
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.timeline import Timeline

if TYPE_CHECKING:
    from twinstream.executor.ranks.rank_run import RankInputs, RankOutcome
    from twinstream.executor.run.training import TokenSource
    from twinstream.executor.state.training_state import State


class NotRunnableError(TwinstreamError):
    """A cluster's schedule that is a prediction: nobody has its kernels."""


@dataclass(frozen=True)
class ClusterRun:
    """What all ranks together came to: the loss of every step, and when every op ran."""

    losses: tuple[float, ...]
    timeline: Timeline


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
        from twinstream.executor.state.parted_state import place_of

        own = part.schedule.workload
        whole = own.model_copy(update={"rounds_per_step": own.rounds_per_step * self.layout.dp})
        batches = TextBatches(self.tokens, whole)
        replica, *_ = place_of(part.coordinates, self.layout.ep)
        before = replica * own.chunks_per_round * own.rounds_per_step

        training = Training(
            _source(batches, before), self.learning_rate, self.seed,
            num_targets=lambda step: whole.tokens_per_step,
        )  # fmt: skip
        return RankInputs(training.host_work(part.schedule), self._state(part))

    def _state(self, part: RankPart) -> State:
        """Of the groups that the rank carries; the bits are those of the whole model's state."""
        from twinstream.executor.providers.registry import provider_of
        from twinstream.executor.state.parted_state import RankStates, place_of
        from twinstream.executor.state.training_state import (
            carried_names,
            fresh_optimizer_state,
        )
        from twinstream.executor.weights.base_cache import in_base

        recipe = Recipe.model_validate(part.schedule.recipe)
        names = set(map(whole_group, carried_names(part.schedule)))
        state: State = {}
        for group, flat in provider_of(self.spec).fresh(self.spec, self.seed):
            if f"param.{group}" in names:
                state[f"param.{group}"] = in_base(self.spec, recipe, group, flat)
            if f"opt.{group}" in names:
                state[f"opt.{group}"] = fresh_optimizer_state(self.spec, group, flat, recipe)
        states = RankStates.of(self.spec, recipe, self.layout)
        return (
            state
            if states is None
            else states.of_rank(state, place_of(part.coordinates, self.layout.ep))
        )


def _source(batches: TextBatches, before: int) -> TokenSource:
    """Chunks of a step from the one after so many."""
    import torch

    def chunk(step: int, index: int) -> Any:
        return torch.from_numpy(batches.chunk(step, before + index))

    return chunk


def spec_of(schedule: Schedule) -> ModelSpec:
    """The model that the ranks train.

    Raises:
        NotRunnableError: the schedule is one of shapes alone, or its model is damaged.
    """
    if not is_executable(schedule):
        raise NotRunnableError(
            f"the schedule predicts a layout that twinstream does not run: {_why_not(schedule)}. "
            "One whose ranks it runs is made by `twinstream plan --ranks N`"
        )
    try:
        return ModelSpec.model_validate(schedule.model)
    except ValidationError as error:
        told = error.errors()[0]
        where = ".".join(map(str, told["loc"]))
        raise NotRunnableError(
            f"the schedule's model is none, at '{where}': {told['msg']}"
        ) from None


def _why_not(schedule: Schedule) -> str:
    recipe = schedule.of(schedule.classes[0]).recipe
    try:
        spec, layout = ModelSpec.model_validate(schedule.model), layout_in(schedule)
        why = run_refusal(spec, Recipe.model_validate(recipe), layout)
    except ValidationError:
        why = None
    return why or "its kernels are a library's"


def run_processes(
    schedule: Schedule, settings: RunSettings, tokens: NDArray[np.int32]
) -> ClusterRun:
    """Start a process for each rank, and return when all are through.

    Raises:
        NotRunnableError: the schedule is one of shapes alone, or its model is damaged.
        TwinstreamError: the text does not suit the model; as `execute_ranks`.
    """
    from twinstream.executor.launch.rank_processes import execute_ranks

    inputs = inputs_of(schedule, settings, tokens)
    outcomes = execute_ranks(schedule, inputs, settings.options())
    return joined_run(schedule, outcomes, settings.num_steps)


def join_as_rank(
    schedule: Schedule, settings: RunSettings, tokens: NDArray[np.int32]
) -> ClusterRun | None:
    """Be the rank that the environment says; the run on rank 0, None on others.

    Raises:
        NotRunnableError: the schedule is one of shapes alone, or its model is damaged.
        RanksDifferError: a rank has another text, learning rate or seed.
        TwinstreamError: the text does not suit the model; as `RankRun.joined`.
    """
    import torch.distributed as dist

    from twinstream.executor.ranks.rank_run import RankRun
    from twinstream.executor.run.execute import choose_backend

    inputs = inputs_of(schedule, settings, tokens)
    with RankRun.joined(schedule, choose_backend(settings.backend)) as run:
        run.world.require_same("inputs", _claims(settings, tokens))
        outcome = run.execute(inputs(run.part), settings.options())
        outcome = _without_state(outcome)
        found: list[RankOutcome | None] = [None] * schedule.mesh.size
        dist.gather_object(outcome, found if run.part.rank == 0 else None)
    if outcome.rank:
        return None
    outcomes = [one for one in found if one is not None]
    return joined_run(schedule, outcomes, settings.num_steps)


def _claims(settings: RunSettings, tokens: NDArray[np.int32]) -> dict[str, str]:
    """What all ranks need alike, and no schedule says."""
    return {
        "a text of hash": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
        "learning rate": f"{settings.learning_rate:g}",
        "seed": str(settings.seed),
    }


def joined_run(schedule: Schedule, outcomes: Sequence[RankOutcome], num_steps: int) -> ClusterRun:
    """What ranks ended with, by rank, as one run of so many steps."""
    timeline = measured_cluster_timeline(schedule, outcomes, num_steps)
    return ClusterRun(_losses(outcomes), timeline)


def inputs_of(schedule: Schedule, settings: RunSettings, tokens: NDArray[np.int32]) -> TextInputs:
    """What makes each rank's inputs.

    Raises:
        NotRunnableError: the schedule is one of shapes alone, or its model is damaged.
        TextError: the text does not suit the model.
    """
    spec = spec_of(schedule)
    check_vocabulary(tokens, spec.vocab_size)
    return TextInputs(spec, layout_in(schedule), tokens, settings.learning_rate, settings.seed)


def _without_state(outcome: RankOutcome) -> RankOutcome:
    """Weights stay where they are."""
    from dataclasses import replace

    return replace(outcome, state={})


def _losses(outcomes: Sequence[RankOutcome]) -> tuple[float, ...]:
    """Of every step: what replicas found of their parts of it, added up in rank order."""
    import torch

    found: dict[int, float] = {}
    for outcome in outcomes:
        # others of cp and tp have the same
        is_told = not any(outcome.coordinates.get(axis, 0) for axis in ("cp", "tp"))
        for one in outcome.fetched if is_told else ():
            if one.sink == "loss":
                part = float(one.values.view(torch.float32).item())
                found[one.pass_number] = found.get(one.pass_number, 0.0) + part
    return tuple(found[number] for number in sorted(found))
