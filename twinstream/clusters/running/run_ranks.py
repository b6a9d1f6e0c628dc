"""Run ranks of a cluster's schedule on text: processes of this machine, or one of torchrun's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinstream.clusters.conforms_ranks import is_executable
from twinstream.clusters.executable import layout_in
from twinstream.clusters.running.measured import measured_cluster_timeline
from twinstream.clusters.running.text_inputs import TextInputs
from twinstream.data.text import check_vocabulary
from twinstream.models.spec import ModelSpec
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.errors import TwinstreamError

if TYPE_CHECKING:
    from twinstream.executor.program.options import RunOptions
    from twinstream.executor.ranks.rank_run import RankOutcome


class NotRunnableError(TwinstreamError):
    """A cluster's schedule that is a prediction: nobody has its kernels."""


@dataclass(frozen=True)
class RankSettings:
    """How to train: steps, and what of it is not in the schedule."""

    num_steps: int = 4
    learning_rate: float = 1e-3
    seed: int = 0
    poison: bool = False
    timed_steps: int | None = None
    backend: str = "cpu"
    graphs: str = "auto"
    nvtx: bool = False


@dataclass(frozen=True)
class ClusterRun:
    """What all ranks together came to: the loss of every step, and when every op ran."""

    losses: tuple[float, ...]
    timeline: ClusterTimeline


def started_by_torchrun() -> bool:
    """Whether this process is one rank of several that somebody has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def spec_of(schedule: ClusterSchedule) -> ModelSpec:
    """The model that the ranks train.

    Raises:
        NotRunnableError: the schedule is one of shapes alone.
    """
    if not is_executable(schedule):
        raise NotRunnableError(
            "the schedule predicts a layout, and nobody has its kernels: one whose ranks can run "
            "is made by `twinstream plan --ranks N`"
        )
    return ModelSpec.model_validate(schedule.model)


def run_processes(
    schedule: ClusterSchedule, settings: RankSettings, tokens: NDArray[np.int32]
) -> ClusterRun:
    """Start a process for each rank, and return when all are through.

    Raises:
        NotRunnableError: the schedule is one of shapes alone.
        TwinstreamError: the text does not suit the model; as `execute_ranks`.
    """
    from twinstream.executor.launch.rank_processes import execute_ranks

    inputs = inputs_of(schedule, settings, tokens)
    outcomes = execute_ranks(schedule, inputs, options_of(settings))
    return joined_run(schedule, outcomes, settings.num_steps)


def join_as_rank(
    schedule: ClusterSchedule, settings: RankSettings, tokens: NDArray[np.int32]
) -> ClusterRun | None:
    """Be the rank that the environment says; the run on rank 0, None on others.

    Raises:
        NotRunnableError: the schedule is one of shapes alone.
        RanksDifferError: a rank has another text, learning rate or seed.
        TwinstreamError: the text does not suit the model; as `RankRun.joined`.
    """
    import torch.distributed as dist

    from twinstream.executor.ranks.rank_run import RankRun
    from twinstream.executor.run.execute import choose_backend

    inputs = inputs_of(schedule, settings, tokens)
    with RankRun.joined(schedule, choose_backend(settings.backend)) as run:
        run.world.require_same("inputs", _claims(settings, tokens))
        outcome = run.execute(inputs(run.part), options_of(settings))
        outcome = _without_state(outcome)
        found: list[RankOutcome | None] = [None] * schedule.mesh.size
        dist.gather_object(outcome, found if run.part.rank == 0 else None)
    if outcome.rank:
        return None
    outcomes = [one for one in found if one is not None]
    return joined_run(schedule, outcomes, settings.num_steps)


def _claims(settings: RankSettings, tokens: NDArray[np.int32]) -> dict[str, str]:
    """What all ranks need alike, and no schedule says."""
    return {
        "a text of hash": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
        "learning rate": f"{settings.learning_rate:g}",
        "seed": str(settings.seed),
    }


def joined_run(
    schedule: ClusterSchedule, outcomes: Sequence[RankOutcome], num_steps: int
) -> ClusterRun:
    """What ranks ended with, by rank, as one run of so many steps."""
    timeline = measured_cluster_timeline(schedule, outcomes, num_steps)
    return ClusterRun(_losses(outcomes), timeline)


def inputs_of(
    schedule: ClusterSchedule, settings: RankSettings, tokens: NDArray[np.int32]
) -> TextInputs:
    """What makes each rank's inputs.

    Raises:
        NotRunnableError: the schedule is one of shapes alone.
        TextError: the text does not suit the model.
    """
    spec = spec_of(schedule)
    check_vocabulary(tokens, spec.vocab_size)
    return TextInputs(spec, layout_in(schedule), tokens, settings.learning_rate, settings.seed)


def options_of(settings: RankSettings) -> RunOptions:
    """The settings as ranks are told them.

    Raises:
        TwinstreamError: what is asked for needs CUDA.
    """
    from twinstream.executor.program.options import RunOptions, choose_graphs, choose_nvtx
    from twinstream.executor.run.execute import choose_backend

    backend = choose_backend(settings.backend)
    return RunOptions(
        backend, settings.num_steps, settings.poison, settings.timed_steps,
        choose_graphs(settings.graphs, backend),
        nvtx=choose_nvtx(backend, asked=settings.nvtx),
    )  # fmt: skip


def _without_state(outcome: RankOutcome) -> RankOutcome:
    """Weights stay where they are."""
    from dataclasses import replace

    return replace(outcome, state={})


def _losses(outcomes: Sequence[RankOutcome]) -> tuple[float, ...]:
    """Of every step: what replicas found of their parts of it, added up in rank order."""
    import torch

    found: dict[int, float] = {}
    for outcome in outcomes:
        for one in outcome.fetched:
            if one.sink == "loss":
                part = float(one.values.view(torch.float32).item())
                found[one.pass_number] = found.get(one.pass_number, 0.0) + part
    return tuple(found[number] for number in sorted(found))
