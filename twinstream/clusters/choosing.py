"""The layout of ranks that run: of all pipelines and replicas the one predicted to be fastest.

`plan --ranks`, `plan --machine --gpus N` and `train --ranks` ask here, so that they choose alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinstream.clusters.pipeline import Stages, plan_pipeline
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.parallel.layout import Layout, LayoutError, stages_of
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.planner import gc_paused
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.planner.search.chunking import admissible, chunkings
from twinstream.planner.search.tokens import proposed_tokens
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import MachineRef, Workload
from twinstream.simulator.network_costs import share_of
from twinstream.simulator.replay import simulate

ROUNDS_OF_A_RANK = 2  # so many microbatches for each rank, or the bubble is most of the step
_TO_FIT = (1, 2, 3)  # ZeRO stages, the less there is to communicate the earlier
_SEVERAL_STAGES = ("interleaved", "ring")


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at: its tokens/s, or why it is none."""

    layout: Layout
    tokens_per_s: float | None
    why_not: str = ""

    def __str__(self) -> str:
        if self.tokens_per_s is None:
            return f"{self.layout.text}: {self.why_not}"
        return f"{self.layout.text}: {self.tokens_per_s:,.0f} tokens/s"


@dataclass(frozen=True)
class ChosenLayout:
    """The fastest layout's schedule and prediction, and all candidates.

    `workload` is the step of all replicas together.
    """

    layout: Layout
    schedule: Schedule
    predicted: Timeline
    workload: Workload
    candidates: tuple[Candidate, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step, as predicted."""
        return self.predicted.step_ns / 1e9

    @property
    def candidate(self) -> Candidate:
        """The layout and its tokens/s."""
        return Candidate(self.layout, self.workload.tokens_per_step / self.step_s)


@dataclass(frozen=True)
class RanksQuestion:
    """What so many ranks train, and where.

    Args:
        workloads: ways to cut the step of all replicas together: layouts are compared by the
            first, and the fastest then tries those of larger chunks and of smaller ones.
        fixed: fields of the layout that are not open.
        cluster, machine: of all ranks, and of one.
        caps: of one rank.
        choices: what is fixed of the plans of all stages.
    """

    spec: ModelSpec
    recipe: Recipe
    workloads: Sequence[Workload]
    num_ranks: int
    fixed: Mapping[str, Any]
    cluster: Cluster
    machine: Machine
    caps: Caps
    choices: Choices = OPEN

    def answer(self, progress: Callable[[str], None] = lambda text: None) -> ChosenLayout:
        """The layout predicted to be fastest of those that are possible and fit.

        Where replicas do not fit whole, and it is not said what they shard, they shard what is
        needed.

        Raises:
            LayoutError: there is none; says why of each.
        """
        first, found = self.workloads[0], list[ChosenLayout]()
        seen: list[Candidate] = []
        for layout in self._layouts():
            wanted = [layout]
            is_open = self.fixed.get("zero") is None and layout.dp > 1
            if is_open and not self._why_not(layout, first):
                wanted += [layout.model_copy(update={"zero": zero}) for zero in _TO_FIT]
            for each in wanted:
                progress(f"planning {each.text}")
                made = self._planned(each, first)
                if isinstance(made, ChosenLayout):
                    found.append(made)
                    seen.append(made.candidate)
                    break
                seen.append(made)
        if not found:
            raise LayoutError(
                f"no layout of {self.num_ranks} ranks can train this: {_reasons(seen)}"
            )
        fastest = min(found, key=lambda one: one.step_s)
        best = self._with_shards(self._with_best_chunks(fastest, progress), progress)
        told = dict.fromkeys(
            best.candidate if one.layout in (best.layout, fastest.layout) else one for one in seen
        )
        return replace(best, candidates=tuple(told))

    def _with_shards(self, found: ChosenLayout, progress: Callable[[str], None]) -> ChosenLayout:
        """With the optimizer's state sharded over replicas, where that is open and faster: each
        then updates its part alone."""
        layout = found.layout
        if self.fixed.get("zero") is not None or layout.dp == 1 or layout.zero:
            return found
        sharded = layout.model_copy(update={"zero": 1})
        progress(f"planning {sharded.text}")
        made = self._planned(sharded, found.workload)
        if isinstance(made, Candidate) or made.step_s >= found.step_s:
            return found
        return self._with_best_chunks(made, progress)

    def _with_best_chunks(
        self, found: ChosenLayout, progress: Callable[[str], None]
    ) -> ChosenLayout:
        """The layout with larger chunks, or smaller ones, for as long as it gets faster."""
        first = found.workload.chunk_tokens
        larger = sorted(
            (one for one in self.workloads if one.chunk_tokens > first), key=_chunk_tokens
        )
        smaller = sorted(
            (one for one in self.workloads if one.chunk_tokens < first),
            key=_chunk_tokens, reverse=True,
        )  # fmt: skip
        best = found
        for others in (larger, smaller):
            for workload in others if best is found else ():
                progress(f"planning chunks of {workload.chunk_tokens:,} tokens")
                made = self._planned(found.layout, workload)
                if isinstance(made, Candidate):
                    continue
                if made.step_s >= best.step_s:
                    break
                best = made
        return best

    def _planned(self, layout: Layout, workload: Workload) -> ChosenLayout | Candidate:
        """A layout planned and predicted, or why it is none."""
        try:
            if why := self._why_not(layout, workload):
                raise LayoutError(why)
            each = workload.rounds_per_step // layout.dp
            replica = workload.model_copy(update={"rounds_per_step": each})
            stages = Stages(self.spec, replica, self.recipe, layout)
            with gc_paused():
                share = share_of(self.machine, self.ranks_on_a_node)
                schedule = plan_pipeline(stages, share, self.caps, self.choices)
            made_for = MachineRef(name=self.machine.name, content_hash=self.machine.content_hash)
            schedule = schedule.model_copy(update={"machine": made_for})
            predicted = simulate(schedule, self.machine, self.cluster)
        except TwinstreamError as error:
            return Candidate(layout, None, str(error))
        return ChosenLayout(layout, schedule, predicted, workload)

    @property
    def ranks_on_a_node(self) -> int:
        """How many ranks share the memory of a host."""
        return min(self.cluster.count("gpus_per_node"), self.num_ranks)

    def _layouts(self) -> Iterator[Layout]:
        """Pipelines first, since they are those of one device's bits.

        Raises:
            LayoutError: what is fixed is no layout of so many ranks.
        """
        fixed, ranks = self.fixed, self.num_ranks
        pp, dp = fixed.get("pp"), fixed.get("dp")
        if ranks % (pp or 1) or ranks % (dp or 1) or (pp and dp and pp * dp != ranks):
            given = f"pp {pp or 'open'} x dp {dp or 'open'}"
            raise LayoutError(f"{given} are not the {ranks} ranks that are asked for")
        virtual = fixed.get("virtual_stages") or 1
        pipeline: Any = fixed.get("pipeline") or ("interleaved" if virtual > 1 else "1f1b")
        if virtual > 1 and pipeline not in _SEVERAL_STAGES:
            raise LayoutError(
                f"{virtual} virtual stages a rank need the pipeline interleaved or ring, not "
                f"{pipeline}"
            )
        for stages in range(ranks, 0, -1):
            replicas, left = divmod(ranks, stages)
            if left or stages != (pp or stages) or replicas != (dp or replicas):
                continue
            several = stages > 1
            yield Layout(
                pp=stages, dp=replicas,
                zero=(fixed.get("zero") or 0) if replicas > 1 else 0,
                reduction=fixed.get("reduction") or "rank_order",
                virtual_stages=virtual if several else 1,
                pipeline=pipeline if several else "1f1b",
                recompute=fixed.get("recompute") or "auto",
                offload=fixed.get("offload") is not False,
            )  # fmt: skip

    def _why_not(self, layout: Layout, workload: Workload) -> str:
        rounds = workload.rounds_per_step
        if rounds % layout.dp:
            return f"{rounds} rounds of a step do not divide among {layout.dp} replicas"
        try:
            stages_of(layout, self.spec.num_layers)
        except LayoutError as error:
            return str(error)
        each = rounds // layout.dp
        if layout.pipeline == "interleaved" and each % layout.pp:
            return f"{each} microbatches are not a multiple of pp {layout.pp} (interleaved)"
        return ""


def workloads_of_ranks(
    spec: ModelSpec, step: TrainingStep, machine: Machine, num_ranks: int,
    most_tokens: int | None = None,
) -> list[Workload]:  # fmt: skip
    """Ways to cut a step; the first has rounds enough for a pipeline of all ranks.

    A round is a microbatch of one chunk, unless `chunks_per_round` says otherwise. Chunks of the
    first are as large as leave two rounds for each rank, or as small as they get. With less than a
    sequence a chunk is a slice of one, and a round has all of a sequence's.

    Args:
        most_tokens: of a step, where tokens per step are open and data are few.

    Raises:
        ChunkingError: the numbers given contradict each other.
    """
    chunk, longest, whole = step.chunk_tokens, step.seq_len, step.pack_tokens
    together = longest // chunk if chunk is not None and chunk < longest else 1
    step = replace(step, chunks_per_round=step.chunks_per_round or together)
    if step.tokens_per_step is None:
        tokens = proposed_tokens(PlanRequest.of(spec, machine, step=step))
        if most_tokens is not None and most_tokens < tokens:
            tokens = max(1, most_tokens // whole) * whole
        least = ROUNDS_OF_A_RANK * num_ranks * whole
        step = replace(step, tokens_per_step=-(-tokens // least) * least)
    found = list(dict.fromkeys((*chunkings(spec, step), *admissible(spec, step))))
    enough = [w for w in found if w.rounds_per_step >= ROUNDS_OF_A_RANK * num_ranks]
    first = enough[0] if enough else max(found, key=lambda workload: workload.rounds_per_step)
    return [first, *(workload for workload in found if workload is not first)]


def _chunk_tokens(workload: Workload) -> int:
    return workload.chunk_tokens


def _reasons(seen: Sequence[Candidate]) -> str:
    """Every reason once, with the layouts it is of."""
    layouts: dict[str, list[str]] = {}
    for one in seen:
        layouts.setdefault(one.why_not, []).append(one.layout.text)
    return "; ".join(f"{' and '.join(names)}: {why}" for why, names in layouts.items())
