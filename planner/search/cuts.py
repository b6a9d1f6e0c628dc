"""The admissible ways to cut a step, each with its lower bound."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import inf

from twinstream.models.spec import ModelSpec
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.bound.segments import Segments
from twinstream.planner.choices import Choices
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import SearchLimits
from twinstream.planner.request import PlanRequest
from twinstream.planner.reuse import Reuse
from twinstream.planner.search.chunking import admissible, chunkings, of_few_blocks, possible
from twinstream.schedule.document import StepBound
from twinstream.schedule.workload import Workload

_SOLVERS = 2  # threads
_NEAR = 1.01  # bounds that differ by less are taken as equal, and the shorter chain comes first
_HELPS = 0.995  # what smaller chunks must bring, for still smaller ones to be looked at


@dataclass(frozen=True)
class Cut:
    """A way to cut the step into chunks and rounds, and what a step takes at least.

    `rough`: the bound is of few segments; one of more may be higher.
    """

    workload: Workload
    bound: Relaxation
    rough: bool


class Cuts:
    """All ways to cut a step that are possible within the caps, as far as they are asked for."""

    def __init__(self, request: PlanRequest, reuse: Reuse, limits: SearchLimits) -> None:
        self.request, self.reuse, self.limits = request, reuse, limits
        self.machine, self.caps = request.machine, request.caps
        self._impossible: set[Workload] = set()
        self._known: dict[Workload, Cut | None] = {}  # refined

    @property
    def spec(self) -> ModelSpec:
        return self.request.spec

    @property
    def choices(self) -> Choices:
        return self.request.choices

    @cached_property
    def usual(self) -> list[Cut]:
        """The preferred cuts, least bound first; where copies make even the best slow, others.

        Smaller chunks are slower to compute, and take less memory: they are bounded as long as
        each size has a bound clearly below that of all larger ones.
        """
        preferred = admissible(self.spec, self.request.step, self.limits)
        usual = self._bounded(preferred, every=False)
        if not usual or usual[0].bound.step_s <= self.limits.slow * self._alone_s(usual[0]):
            return usual
        preferred += chunkings(self.spec, self.request.step, self.limits)
        for workloads in self._others_by_size(usual, self._of_few_blocks(preferred)):
            cuts = least_first([*usual, *self._bounded(workloads, every=True)])
            helped = least_bound_s(cuts) < _HELPS * least_bound_s(usual)
            usual = cuts
            if not helped:
                break
        return usual

    @cached_property
    def all(self) -> list[Cut]:
        """The usual ones, smaller chunks, too, and whatever else is possible at all."""
        others = self._others_by_size(self.usual, self.workloads)
        workloads = [workload for of_size in others for workload in of_size]
        return least_first([*self.usual, *self._bounded(workloads, every=True)])

    @cached_property
    def workloads(self) -> list[Workload]:
        """All that may be possible, each once, of not too many blocks."""
        return self._of_few_blocks(possible(self.spec, self.request.step, self.limits))

    def in_turn(self, cuts: Sequence[Cut]) -> Iterator[Cut]:
        """The least bound first; rough ones are refined where their turn comes."""
        left = list(cuts)
        while left:
            cut, *left = least_first(left)
            if not cut.rough:
                yield cut
            elif (refined := self._refined(cut)) is not None:
                left.append(refined)

    def step_bound_of(self, cut: Cut) -> StepBound:
        """The bound of a cut of which there is a plan, and the least of all."""
        family_s = min(cut.bound.step_s, self._least_s(self.usual or self.all))
        bound = cut.bound.as_step_bound(family_s)
        return bound.model_copy(update={"fixed": self.choices.told})

    def _least_s(self, cuts: Sequence[Cut]) -> float:
        """The least bound of all, none of them rough; infinite if there is none."""
        left = list(cuts)
        while left:
            least = min(left, key=lambda cut: cut.bound.step_s)
            if not least.rough:
                return least.bound.step_s
            left.remove(least)
            if (refined := self._refined(least)) is not None:
                left.append(refined)
        return inf

    def cut_of(self, workload: Workload) -> Cut:
        """A cut of which there is a plan, with its bound."""
        cut = self._known.get(workload) or self._cut(workload)
        assert cut is not None, "what has a plan has a bound"
        return cut

    def view(self, workload: Workload, most_rounds: int) -> ChainView:
        """The chain of a cut, of no more than so many rounds."""
        return self.reuse.view(self.spec, workload, self.request.recipe, most_rounds)

    def program(self, workload: Workload, kind: ProgramKind) -> BoundProgram:
        recipe = self.request.recipe
        return self.reuse.program(self.spec, workload, recipe, self.machine, kind)

    def _bounded(self, workloads: Sequence[Workload], *, every: bool) -> list[Cut]:
        """Those of the workloads that have a bound, the least first, with few segments.

        Left out, unless `every` is wanted, are those whose tasks alone take longer than the bound
        of the first.
        """
        if not workloads:
            return []
        self.choices.check(self.view(workloads[0], 1).chain)
        first = self._cut(workloads[0], self.limits.rough_segments)
        least_s = inf if first is None or every else first.bound.step_s
        left = [w for w in workloads[1:] if self._alone_s_of(w) < least_s]
        with ThreadPoolExecutor(_SOLVERS) as pool:
            others = pool.map(lambda w: self._cut(w, self.limits.rough_segments), left)
            return least_first([first, *others])

    def _cut(self, workload: Workload, most_segments: int | None = None) -> Cut | None:
        """A cut with its bound, of so many segments at most; None where nothing fits."""
        most = self.limits.bound_segments if most_segments is None else most_segments
        bound = self.program(workload, ProgramKind(self.choices, most)).bound(self.caps)
        if bound is None:
            self._impossible.add(workload)
            return None
        chain = self.view(workload, PROGRAM_ROUNDS).chain
        more = self.choices.effort != "quick" and (
            Segments.of(chain, self.limits.bound_segments).of_task != bound.segment_of_task
        )
        return Cut(workload, bound, rough=more)

    def _refined(self, cut: Cut) -> Cut | None:
        """With the bound of as many segments as it takes."""
        if cut.workload not in self._known:
            self._known[cut.workload] = self._cut(cut.workload)
        return self._known[cut.workload]

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

    def _of_few_blocks(self, workloads: Iterable[Workload]) -> list[Workload]:
        once = list(dict.fromkeys(workloads))
        return of_few_blocks(self.spec, once, PROGRAM_ROUNDS, self.limits.blocks)

    def _alone_s(self, cut: Cut) -> float:
        return self._alone_s_of(cut.workload)

    def _alone_s_of(self, workload: Workload) -> float:
        """What the tasks of all rounds take alone."""
        view = self.view(workload, PROGRAM_ROUNDS)
        chain, alone = view.chain, view.call_ns(self.machine)
        total_ns = sum(alone[task.call] for task in chain.tasks)
        more = workload.rounds_per_step - len(chain.round_starts)
        if more > 0:
            middle = chain.tasks[chain.round_starts[1] : chain.round_starts[2]]
            total_ns += more * sum(alone[task.call] for task in middle)
        return total_ns / 1e9


def least_bound_s(cuts: Iterable[Cut | None]) -> float:
    return min((cut.bound.step_s for cut in cuts if cut is not None), default=inf)


def least_first(cuts: Iterable[Cut | None]) -> list[Cut]:
    """By their bounds; of nearly equal ones the shortest chain first."""
    found = [cut for cut in cuts if cut is not None]
    near_s = _NEAR * least_bound_s(found)

    def order(cut: Cut) -> tuple[float, int]:
        rounds = min(cut.workload.rounds_per_step, PROGRAM_ROUNDS)
        chunks = rounds * cut.workload.chunks_per_round
        return max(cut.bound.step_s, near_s), chunks if cut.bound.step_s <= near_s else 0

    return sorted(found, key=order)
