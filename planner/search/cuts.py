"""The admissible ways to cut a step, each with its lower bound."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.spec import ModelSpec
from twinstream.planner.bound.kept_programs import FEW_SEGMENTS, kept_program, rough_guide
from twinstream.planner.bound.lower_bound import LowerBound
from twinstream.planner.bound.segments import Segments
from twinstream.planner.choices import Choices
from twinstream.planner.kept import kept_chain
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.plan import recipe_of
from twinstream.planner.search.chunking import (
    TrainingStep,
    admissible,
    chunkings,
    of_few_blocks,
    possible,
)
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

_NEAR = 1.01
_SLOW = 1.2
_HELPS = 0.995
_MOST_BLOCKS = 20_000
_SOLVERS = 2


@dataclass(frozen=True)
class Cut:
    """A way to cut the step, its first few rounds, and what a step takes at least.

    `rough`: the bound is of few segments; one of more may be higher.
    """

    workload: Workload
    small: Chain
    bound: LowerBound
    rough: bool


class Cuts:
    """All ways to cut a step that are possible within the caps, as far as they are asked for."""

    def __init__(
        self, spec: ModelSpec, step: TrainingStep, machine: Machine, choices: Choices, caps: Caps
    ) -> None:
        self.spec, self.step, self.machine, self.caps = spec, step, machine, caps
        self.choices = choices
        self.recipe = recipe_of("optimal", step.recipe)
        self._impossible: set[Workload] = set()
        self._beside = ThreadPoolExecutor(_SOLVERS)
        self._refining: dict[Workload, Future[Cut | None]] = {}

    @cached_property
    def usual(self) -> list[Cut]:
        """The preferred ways to cut; and where copies make even the best of them slow, others.

        Smaller chunks are slower to compute, and take less memory: they are bounded as long as
        each size has a bound clearly below that of all larger ones.
        """
        usual = self.bounded(admissible(self.spec, self.step))
        if self.choices.effort == "thorough" or not usual:
            return self._with_all_others(usual)
        best = usual[0]
        if best.bound.step_s <= _SLOW * self._alone_s(best.small, best.workload):
            return usual
        preferred = [*admissible(self.spec, self.step), *chunkings(self.spec, self.step)]
        others = of_few_blocks(
            self.spec, list(dict.fromkeys(preferred)), PROGRAM_ROUNDS, _MOST_BLOCKS
        )
        for workloads in self._others_by_size(usual, others):
            cuts = least_first([*usual, *self.bounded(workloads, every=True)])
            helped = self.least_refined_s(cuts) < _HELPS * self.least_refined_s(usual)
            usual = cuts
            if not helped:
                break
        return usual

    @cached_property
    def all(self) -> list[Cut]:
        """The usual ones, smaller chunks, too, and whatever else is possible at all."""
        return self._with_all_others(self.usual)

    def _with_all_others(self, cuts: list[Cut]) -> list[Cut]:
        workloads = self.all_workloads(PROGRAM_ROUNDS, _MOST_BLOCKS)
        others = [w for of_size in self._others_by_size(cuts, workloads) for w in of_size]
        return least_first([*cuts, *self.bounded(others, every=True)])

    def _others_by_size(
        self, cuts: Sequence[Cut], workloads: Sequence[Workload]
    ) -> list[list[Workload]]:
        """What may be possible beside the cuts, by the size of chunks, the largest first."""
        known = self._impossible.union(cut.workload for cut in cuts)
        by_size: dict[int, list[Workload]] = {}
        for workload in workloads:
            if workload not in known:
                by_size.setdefault(workload.chunk_tokens, []).append(workload)
        return [by_size[size] for size in sorted(by_size, reverse=True)]

    def all_workloads(self, most_rounds: int, most_blocks: int) -> list[Workload]:
        """All that may be possible, each once, of no more blocks in so many rounds."""
        return of_few_blocks(self.spec, possible(self.spec, self.step), most_rounds, most_blocks)

    def bounded(self, workloads: Sequence[Workload], *, every: bool = False) -> list[Cut]:
        """Those of the workloads that have a bound, the least first.

        Left out, unless `every` is wanted, are those whose tasks alone take longer than the bound
        of another. All others are bounded with few segments; with many, those that may turn out
        to have the least.
        """
        if not workloads:
            return []
        self.choices.check(self.lowered(workloads[0], 1))

        def roughly(workload: Workload) -> Cut | None:
            return self.cut(self.lowered(workload, PROGRAM_ROUNDS), workload, FEW_SEGMENTS)

        def unless_slow(workload: Workload) -> Cut | None:
            alone_s = self._alone_s(self.lowered(workload, PROGRAM_ROUNDS), workload)
            if first.done() and alone_s >= _least_bound_s([first.result()]):
                return None
            cut = roughly(workload)
            if alone_s >= _least_bound_s([first.result()]):
                self._impossible.discard(workload)  # as if it had not been tried
                return None
            return cut

        with ThreadPoolExecutor(_SOLVERS) as pool:
            first = pool.submit(roughly, workloads[0])
            others = pool.map(roughly if every else unless_slow, workloads[1:])
            rough = least_first([first.result(), *others])
            if not rough:
                return []
            if self.choices.effort == "quick":
                return [replace(cut, rough=False) for cut in rough]
            if not rough[0].rough and not every:
                self._refine_beside(rough)
                return rough
            best = self.refined(rough[0])
            least_s = inf if best is None else best.bound.step_s
            left = [cut for cut in rough[1:] if cut.bound.step_s >= least_s]
            again = [cut for cut in rough[1:] if cut.bound.step_s < least_s]
            return least_first([best, *pool.map(self.refined, again), *left])

    def _refine_beside(self, cuts: Sequence[Cut]) -> None:
        """Begin to refine what may have the least bound while other work goes on."""
        least_s = min(cut.bound.step_s for cut in cuts if not cut.rough)
        for cut in cuts:
            if cut.rough and cut.bound.step_s < least_s:
                refining = self._beside.submit(self.cut, cut.small, cut.workload)
                self._refining[cut.workload] = refining

    def close(self) -> None:
        """Begin no more of what was to go on beside."""
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._refining = {w: one for w, one in self._refining.items() if not one.cancelled()}

    def refined(self, cut: Cut) -> Cut | None:
        """With the bound of as many segments as it takes; None where nothing fits."""
        if not cut.rough:
            return cut
        if (refining := self._refining.get(cut.workload)) is not None:
            return refining.result()
        return self.cut(cut.small, cut.workload)

    def cut(self, small: Chain, workload: Workload, most_segments: int | None = None) -> Cut | None:
        """A way to cut with its bound, of so many segments at most; None where nothing fits."""
        program = kept_program(
            small, self.machine, num_rounds=workload.rounds_per_step, choices=self.choices,
            most_segments=most_segments,
        )  # fmt: skip
        bound = program.bound(self.caps, of_many=self.choices.effort == "thorough")
        if bound is None:
            self._impossible.add(workload)
            return None
        more = most_segments is not None and Segments.of(small).of_task != bound.segment_of_task
        return Cut(workload, small, bound, rough=more)

    def least_host_bytes(self, workload: Workload) -> float:
        """What its homes take of the host at least; infinite where nothing fits the device."""
        program = rough_guide(
            self.lowered(workload, PROGRAM_ROUNDS), self.machine,
            num_rounds=workload.rounds_per_step, choices=self.choices,
        )  # fmt: skip
        found = program.least_home_bytes(self.caps)
        return inf if found is None else found

    def least_refined_s(self, cuts: Sequence[Cut]) -> float:
        """The least bound of all, refined where that was begun."""
        known = [self.refined(cut) if cut.workload in self._refining else cut for cut in cuts]
        return _least_bound_s(known)

    def lowered(self, workload: Workload, most_rounds: int) -> Chain:
        """The chain of a step, of no more than so many rounds."""
        rounds = min(workload.rounds_per_step, most_rounds)
        fewer = workload.model_copy(update={"rounds_per_step": rounds})
        return kept_chain(self.spec, fewer, self.recipe)

    def _alone_s(self, small: Chain, workload: Workload) -> float:
        """What the tasks of all rounds take alone."""
        alone = {name: cost_alone_ns(c.cost, self.machine) for name, c in small.calls.items()}
        total_ns = sum(alone[task.call] for task in small.tasks)
        more = workload.rounds_per_step - len(small.round_starts)
        if more > 0:
            middle = small.tasks[small.round_starts[1] : small.round_starts[2]]
            total_ns += more * sum(alone[task.call] for task in middle)
        return total_ns / 1e9


def _least_bound_s(cuts: Iterable[Cut | None]) -> float:
    return min((cut.bound.step_s for cut in cuts if cut is not None), default=inf)


def least_first(cuts: Iterable[Cut | None]) -> list[Cut]:
    """By their bounds; of nearly equal ones the shorter chain first."""
    found = [cut for cut in cuts if cut is not None]
    near_s = _NEAR * _least_bound_s(found)

    def order(cut: Cut) -> tuple[float, int]:
        length = len(cut.small.tasks) if cut.bound.step_s <= near_s else 0
        return max(cut.bound.step_s, near_s), length

    return sorted(found, key=order)
