"""The admissible ways to cut a step, each with its lower bound."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from twinstream.planner.arena_caps import is_hopeless
from twinstream.planner.bound.host_bound import raised_by_host
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.lifetimes.host_tasks import host_tasks
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import SearchLimits
from twinstream.planner.request import PlanRequest
from twinstream.planner.reuse import Reuse
from twinstream.planner.search.chunking import admissible, chunkings, possible, with_few_blocks
from twinstream.schedule.document import StepBound
from twinstream.schedule.workload import Workload

_SOLVERS = 2  # threads


@dataclass(frozen=True)
class StepCut:
    """A way to cut the step into chunks and rounds, and the lower bound on the step's time."""

    workload: Workload
    bound: Relaxation


class Cuts:
    """All ways to cut a step that are possible within the caps, bounded as they are asked for."""

    def __init__(self, request: PlanRequest, reuse: Reuse, limits: SearchLimits) -> None:
        self.request, self.reuse, self.limits = request, reuse, limits
        self.spec, self.machine = request.spec, request.machine
        self.caps, self.choices = request.caps, request.choices
        self._bounds: dict[Workload, Relaxation | None] = {}

    def within(self, device_bytes: int) -> "Cuts":
        """Return the cuts of the same step with so much device memory."""
        caps = self.caps.model_copy(update={"device_bytes": device_bytes})
        return Cuts(replace(self.request, caps=caps), self.reuse, self.limits)

    @property
    def is_frozen(self) -> bool:
        """Return whether parameters of the model are frozen (only read)."""
        return bool(self.request.recipe.lora or self.request.recipe.frozen)

    @cached_property
    def usual(self) -> list[StepCut]:
        """The preferred cuts, least bound first; and others where copies make even the best slow.

        Smaller chunks are slower to compute, and take less memory: they are bounded as long as
        each size has a bound clearly below that of all larger ones.
        """
        preferred = admissible(self.spec, self.request.step, self.limits)
        if is_hopeless(self.view(preferred[0], 1).chain, self.caps, self.machine):
            return []  # as _bounded says, before a program is made
        if self.bound(preferred[0]) is None and not self.is_possible:
            return []
        usual = self._bounded(preferred, every=False)
        if not usual or self._is_near(usual[0]):
            return usual
        preferred += chunkings(self.spec, self.request.step, self.limits)
        for workloads in self._others_by_size(usual, preferred):
            cuts = self._least_first([*usual, *self._bounded(workloads, every=True)])
            helped = cuts[0] is not usual[0]
            usual = cuts
            if not helped:
                break
        return usual

    @cached_property
    def all(self) -> list[StepCut]:
        """The usual cuts, smaller chunks too, and whatever else is possible at all."""
        if not self.is_possible:
            return []
        others = self._others_by_size(self.usual, self.workloads)
        workloads = [workload for of_size in others for workload in of_size]
        return self._least_first([*self.usual, *self._bounded(workloads, every=True)])

    @cached_property
    def workloads(self) -> list[Workload]:
        """All workloads that may be possible, each once, of not too many blocks."""
        return self._with_few_blocks(possible(self.spec, self.request.step, self.limits))

    @cached_property
    def smallest(self) -> list[Workload]:
        """The workloads that take the least memory: of no other are chunks and rounds both smaller.

        Any other needs at least what one of these does: it has all their tasks, with tensors that
        are as large, and more. A single round is not compared with one of several, which carry
        gradients from round to round.
        """

        def is_smaller(one: Workload, other: Workload) -> bool:
            pairs = (one.chunk_tokens, other.chunk_tokens), (
                one.chunks_per_round, other.chunks_per_round,
            )  # fmt: skip
            alike = (one.rounds_per_step == 1) == (other.rounds_per_step == 1)
            return one != other and alike and all(mine <= theirs for mine, theirs in pairs)

        return [
            one
            for one in self.workloads
            if not any(is_smaller(other, one) for other in self.workloads)
        ]

    @cached_property
    def is_possible(self) -> bool:
        """Return whether the program allows any cut within the caps.

        What persists is the same in all cuts: where it alone is too large, none is solved.
        """
        if is_hopeless(self.view(self.smallest[0], 1).chain, self.caps, self.machine):
            return False
        return any(self.bound(workload) is not None for workload in self.smallest)

    def step_bound_of(self, workload: Workload) -> StepBound:
        """Return the bound of a cut that has a plan, together with the least bound of all cuts."""
        own, raised = self.bound_of(workload), self.raised_bound(workload)
        assert raised is not None, "what has a plan has a bound"
        least_s = min(
            cut.bound.step_s for cut in [StepCut(workload, own), *(self.usual or self.all)]
        )
        return raised.model_copy(update={"family_step_s": least_s, "fixed": self.choices.fixed})

    def raised_bound(self, workload: Workload) -> StepBound | None:
        """Return the bound of a cut with what tasks on the host add; None where nothing fits."""
        if (own := self.bound(workload)) is None:
            return None
        chain = self.view(workload, PROGRAM_ROUNDS).chain
        bound = own.as_step_bound()
        return raised_by_host(bound, chain, self.machine) if host_tasks(chain) else bound

    def bound_of(self, workload: Workload) -> Relaxation:
        """Return the bound of a cut that has a plan."""
        bound = self.bound(workload)
        assert bound is not None, "what has a plan has a bound"
        return bound

    def view(self, workload: Workload, most_rounds: int) -> ChainView:
        """Return the chain of a cut, of no more than so many rounds."""
        return self.reuse.view(self.spec, workload, self.request.recipe, most_rounds)

    def program(self, workload: Workload, kind: ProgramKind) -> BoundProgram:
        recipe = self.request.recipe
        return self.reuse.program(self.spec, workload, recipe, self.machine, kind)

    def kind(self, most_segments: int, *, tied: bool = False) -> ProgramKind:
        """Return the kind of a program of these cuts."""
        return ProgramKind(
            self.choices, most_segments, tied, self.caps.disk_bytes is not None,
            any_updates=self.choices.optimizer == "auto",
        )  # fmt: skip

    def _bounded(self, workloads: Sequence[Workload], *, every: bool) -> list[StepCut]:
        """Return the workloads that have a bound, as cuts, the least first.

        Left out, unless `every` is wanted, are those whose tasks alone take longer than the bound
        of the first; with frozen parameters, clearly longer: plans of large chunks seldom are near.
        """
        if not workloads:
            return []
        one_round = self.view(workloads[0], 1).chain
        self.choices.check(one_round)
        if is_hopeless(one_round, self.caps, self.machine):
            return []
        first = self.bound(workloads[0])
        least_s = inf if first is None or every else first.step_s
        least_s *= self.limits.near_equal if self.is_frozen else 1.0
        # no bound is below the time of the tasks alone: such a cut need not be solved
        left = [w for w in workloads[1:] if self._alone_s(w) < least_s]
        with ThreadPoolExecutor(_SOLVERS) as pool:
            bounds = [first, *pool.map(self.bound, left)]
        found = zip([workloads[0], *left], bounds, strict=True)
        return self._least_first([StepCut(w, bound) for w, bound in found if bound is not None])

    def _least_first(self, cuts: Sequence[StepCut]) -> list[StepCut]:
        """Sort cuts by their bounds; of nearly equal ones the shortest chain comes first."""
        near_s = self.limits.near_equal * min((cut.bound.step_s for cut in cuts), default=0.0)

        def order(cut: StepCut) -> tuple[float, int]:
            rounds = min(cut.workload.rounds_per_step, PROGRAM_ROUNDS)
            length = rounds * cut.workload.chunks_per_round
            return max(cut.bound.step_s, near_s), length if cut.bound.step_s <= near_s else 0

        return sorted(cuts, key=order)

    def bound(self, workload: Workload) -> Relaxation | None:
        """Return the lower bound of a cut; None where nothing fits."""
        if workload not in self._bounds:
            kind = self.kind(self.limits.bound_segments)
            self._bounds[workload] = self.program(workload, kind).bound(self.caps)
        return self._bounds[workload]

    def _is_near(self, cut: StepCut) -> bool:
        """Whether copies add little to what its tasks take alone."""
        return cut.bound.step_s <= self.limits.slow * self._alone_s(cut.workload)

    def _others_by_size(
        self, cuts: Sequence[StepCut], workloads: Iterable[Workload]
    ) -> list[list[Workload]]:
        """Return what may be possible beside the cuts, by size of chunks, the largest first."""
        known = {workload for workload, bound in self._bounds.items() if bound is None}
        known.update(cut.workload for cut in cuts)
        by_size: dict[int, list[Workload]] = {}
        for workload in self._with_few_blocks(workloads):
            if workload not in known:
                by_size.setdefault(workload.chunk_tokens, []).append(workload)
        return [by_size[size] for size in sorted(by_size, reverse=True)]

    def _with_few_blocks(self, workloads: Iterable[Workload]) -> list[Workload]:
        once = list(dict.fromkeys(workloads))
        return with_few_blocks(self.spec, once, PROGRAM_ROUNDS, self.limits.blocks)

    def _alone_s(self, workload: Workload) -> float:
        """Return the seconds that the tasks of all rounds take alone."""
        view = self.view(workload, PROGRAM_ROUNDS)
        chain, alone = view.chain, view.call_ns(self.machine)
        total_ns = sum(alone[task.call] for task in chain.tasks)
        more = workload.rounds_per_step - len(chain.round_starts)
        if more > 0:
            middle = chain.tasks[chain.round_starts[1] : chain.round_starts[2]]
            total_ns += more * sum(alone[task.call] for task in middle)
        return total_ns / 1e9
