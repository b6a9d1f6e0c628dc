"""The fastest of the layouts that run here: few, so that each is planned whole, best bound first.

`plan --ranks`, `plan --machine --gpus N` and `train --ranks` ask here, so that they choose alike.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from twinstream.clusters.predict import planned_ranks, predicted_whole
from twinstream.clusters.refusals import refusals_of, require_possible
from twinstream.clusters.search.bounds import BoundTables, has_bounds
from twinstream.clusters.search.found import Candidate, RankedLayout, SearchResult
from twinstream.clusters.search.space import NoLayoutError, SearchSpace
from twinstream.clusters.search.workers import Processes
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import MachineRef, Workload
from twinstream.simulator.replay import simulate

_Kind = Literal["one", "several", "parts"]
_ORDER: tuple[_Kind, ...] = ("one", "several", "parts")
# Layouts that are planned after all of the first kind: plans take up to a minute, in parts some.
_MOST_FURTHER: Mapping[_Kind, int] = {"several": 4, "parts": 2}
_NEAR = 1.01  # x the bound: what other cuts and shards may gain has to be more


@dataclass(frozen=True)
class _Ladder:
    """Layouts that differ in what replicas shard, least first: the first that fits is taken."""

    layouts: tuple[Layout, ...]
    bound_s: float

    @property
    def kind(self) -> _Kind:
        """What ranks have: whole blocks of a stage or of several, or parts of blocks."""
        first = self.layouts[0]
        return "parts" if first.in_parts else "several" if first.virtual_stages > 1 else "one"


def fastest_planned(asked: SearchSpace, progress: Callable[[str], None]) -> SearchResult:
    """Plan what may be the fastest by the first cut of the step; then the best with other cuts.

    Where replicas do not fit whole, and it is not said what they shard, they shard what is needed.

    Raises:
        NoLayoutError: none is possible, or fits; says why of each.
    """
    with Processes() as processes:
        return _Planned(asked, progress, processes).best()


class _Planned:
    def __init__(
        self, asked: SearchSpace, progress: Callable[[str], None], processes: Processes
    ) -> None:
        assert asked.here is not None, "these layouts run here"
        self._processes = processes
        self._asked, self._here, self._progress = asked, asked.here, progress
        self._tried: dict[tuple[Layout, Workload | None], RankedLayout | Candidate] = {}

    def best(self) -> SearchResult:
        asked = self._asked
        possible = asked.possible()
        ladders = self._ladders(possible)
        found, seen = self._climbed(ladders, asked.job)
        if not found:
            found, seen = self._by_smaller_cuts(ladders, seen)
        if not found:
            raise NoLayoutError(
                f"no layout of {asked.num_gpus} ranks can train this: {_reasons(seen)}"
            )
        fastest = min(found, key=_step_s)
        best = self._climbed_on(fastest)
        told = [best.candidate if one.layout == fastest.layout else one for one in seen]
        others = sorted((one for one in found if one is not fastest), key=_step_s)
        least_s = min(ladder.bound_s for ladder in ladders)
        return SearchResult(
            (best, *others), least_s, len(possible), len(found), len(self._tried), _told(told)
        )

    def _by_smaller_cuts(
        self, ladders: Sequence[_Ladder], seen: list[Candidate]
    ) -> tuple[list[RankedLayout], list[Candidate]]:
        """By the largest chunks with which something fits, where nothing does by the first cut.

        Where nothing fits with the smallest, those between are not tried.
        """
        first = _chunk_tokens(self._asked.job)
        cuts = [job for job in self._here.other_cuts if _chunk_tokens(job) < first]
        cuts.sort(key=_chunk_tokens)
        if not cuts or not (by_least := self._climbed(ladders, cuts[0]))[0]:
            return [], seen
        for cut in reversed(cuts[1:]):
            if (by_this := self._climbed(ladders, cut))[0]:
                return by_this
        return by_least

    def _climbed(
        self, ladders: Sequence[_Ladder], cut: Job
    ) -> tuple[list[RankedLayout], list[Candidate]]:
        """The layouts that fit by one cut of the step, and what is said of all.

        The first, of the best bound, gets all its cuts and shards at once, unless it is near that:
        so few others are planned.
        """
        found: list[RankedLayout] = []
        seen: list[Candidate] = []
        left = Counter(_MOST_FURTHER)
        for ladder in ladders:
            bound_s = ladder.bound_s
            is_beaten = bound_s >= min((one.step_s for one in found), default=math.inf)
            is_further = bool(found) and ladder.kind != ladders[0].kind
            if is_beaten or (is_further and not left[ladder.kind]):
                if bound_s:
                    most = cut.tokens_per_step / bound_s
                    seen.append(Candidate(ladder.layouts[0], most, is_bound=True))
                continue
            left[ladder.kind] -= is_further
            for layout in ladder.layouts:
                laid_out = cut.laid_out(_cut_as(layout, cut))
                made = self._planned(laid_out, bound_s, laid_out.layout.text)
                if isinstance(made, RankedLayout):
                    is_first_and_far = not found and made.step_s > _NEAR * bound_s
                    found.append(self._climbed_on(made) if is_first_and_far else made)
                    seen.append(found[-1].candidate)
                    break
                seen.append(made)
        return found, seen

    def _ladders(self, possible: Sequence[Layout]) -> list[_Ladder]:
        """By kind, the best bound of all cuts first; of equal ones pipelines, whose bits are one
        device's.

        Where it is open what replicas shard, all that they may are steps of one ladder.
        """
        steps: dict[Layout, list[tuple[Layout, float]]] = {}
        for layout, bound_s in zip(possible, self._bounds_s(possible), strict=True):
            steps.setdefault(layout.model_copy(update={"zero": 0}), []).append((layout, bound_s))
        ladders = [
            _Ladder(tuple(layout for layout, _ in each), min(bound_s for _, bound_s in each))
            for each in steps.values()
        ]
        return sorted(
            ladders,
            key=lambda one: (_ORDER.index(one.kind), one.bound_s, -one.layouts[0].pp),
        )

    def _bounds_s(self, possible: Sequence[Layout]) -> list[float]:
        """Of the best cut; 0 where one has no bound, or the profile not all that it takes."""
        cuts = [self._asked.job, *self._here.other_cuts]
        if not all(map(has_bounds, cuts)):
            return [0.0] * len(possible)
        tables = [BoundTables(job, self._asked.pricing) for job in cuts]
        return [
            min(
                self._bound_s(table, job.laid_out(_cut_as(layout, job)))
                for table, job in zip(tables, cuts, strict=True)
            )
            for layout in possible
        ]

    def _bound_s(self, tables: BoundTables, job: Job) -> float:
        """Of one cut; none that cannot be beats another."""
        if refusals_of(job):
            return math.inf
        try:
            if job.layout.in_parts or job.layout.ep > 1:
                return tables.split_s(job.layout)
            return float(tables.of([job.layout]).step_s[0])
        except TwinstreamError:
            return 0.0

    def _climbed_on(self, found: RankedLayout) -> RankedLayout:
        """The layout by its best cut, with shards where these are faster."""
        return self._with_shards(self._with_best_cut(found))

    def _with_shards(self, found: RankedLayout) -> RankedLayout:
        """With the optimizer's state sharded over replicas, where that is open and faster: each
        then updates its part alone."""
        layout = found.layout
        if self._asked.fixed.get("zero") is not None or layout.dp * layout.cp == 1 or layout.zero:
            return found
        sharded = layout.model_copy(update={"zero": 1})
        made = self._planned(found.job.laid_out(sharded), found.bound_s, sharded.text)
        if isinstance(made, Candidate) or made.step_s >= found.step_s:
            return found
        return self._with_best_cut(made)

    def _with_best_cut(self, found: RankedLayout) -> RankedLayout:
        """The layout with larger chunks, or smaller ones, for as long as it gets faster.

        Where sequences are in slices, chunks are these, however the step is cut.
        """
        if found.layout.splits_sequences:
            return found
        first = _chunk_tokens(found.job)
        cuts = sorted((self._asked.job, *self._here.other_cuts), key=_chunk_tokens)
        larger = [job for job in cuts if _chunk_tokens(job) > first]
        smaller = [job for job in reversed(cuts) if _chunk_tokens(job) < first]
        best = found
        for others in (larger, smaller):
            for job in others if best is found else ():
                cut = job.laid_out(_cut_as(found.layout, job))
                made = self._planned(cut, found.bound_s, f"chunks of {_chunk_tokens(job):,} tokens")
                if isinstance(made, Candidate):
                    continue
                if made.step_s >= best.step_s:
                    break
                best = made
        return best

    def _planned(self, job: Job, bound_s: float, what: str) -> RankedLayout | Candidate:
        """A layout planned and predicted, once, or why it is none."""
        place = job.layout, job.cut  # which is None where the micro-batch says it all
        if place not in self._tried:
            self._progress(f"planning {what}")
            self._tried[place] = self._newly_planned(job, bound_s)
        return self._tried[place]

    def _newly_planned(self, job: Job, bound_s: float) -> RankedLayout | Candidate:
        machine, caps = self._here.machine, self._asked.pricing.caps
        assert caps is not None, "plans have caps"
        try:
            require_possible(job, self._asked.num_gpus)
            told = self._asked.cluster, machine, caps, self._here.choices
            schedule = planned_ranks(job, *told, self._processes.each)
            made_for = MachineRef(name=machine.name, content_hash=machine.content_hash)
            schedule = schedule.model_copy(update={"machine": made_for})
            timeline = simulate(schedule, machine, self._asked.cluster)
            prediction = predicted_whole(job, schedule, timeline, machine, caps)
        except TwinstreamError as error:
            return Candidate(job.layout, None, str(error))
        return RankedLayout(job, bound_s, prediction, schedule, timeline)


def _told(seen: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Of layouts of the same degrees the fastest, and what refused the others."""
    fastest: dict[tuple[int, ...], Candidate] = {}
    for one in sorted(seen, key=lambda one: (one.is_bound, -(one.tokens_per_s or 0.0))):
        if one.tokens_per_s is not None:
            fastest.setdefault(_degrees(one.layout), one)
    return tuple(one for one in seen if one.why_not or one is fastest[_degrees(one.layout)])


def _degrees(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.cp, layout.pp, layout.dp, layout.ep


def _cut_as(layout: Layout, job: Job) -> Layout:
    """The layout with a job's micro-batch."""
    return layout.model_copy(update={"micro_batch": job.layout.micro_batch})


def _step_s(one: RankedLayout) -> float:
    return one.step_s


def _chunk_tokens(job: Job) -> int:
    return job.workload.chunk_tokens


def _reasons(seen: Sequence[Candidate]) -> str:
    """Every reason once, with the layouts it is of."""
    layouts: dict[str, list[str]] = {}
    for one in seen:
        layouts.setdefault(one.why_not, []).append(one.layout.text)
    return "; ".join(f"{' and '.join(names)}: {why}" for why, names in layouts.items())
