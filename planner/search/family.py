"""The search for the best plan of `optimal` over all admissible ways to cut a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import NoReturn

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import Choices
from twinstream.planner.decide.decider import DoesNotFit
from twinstream.planner.emit.unrolling import of_all_rounds
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.lifetimes.rounds import JUDGED_ROUNDS, PROGRAM_ROUNDS
from twinstream.planner.plan import as_step_bound, finished
from twinstream.planner.refuse.last_resort import LastResort
from twinstream.planner.refuse.refusal import refused, refused_as_fixed, refused_unnamed
from twinstream.planner.rules.streaming import streaming_plan
from twinstream.planner.search.chunking import TrainingStep
from twinstream.planner.search.cuts import Cut, Cuts, least_first
from twinstream.planner.search.judged_plan import Plan, tightest
from twinstream.planner.search.optimal import optimal_plans, streamed
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule, StepBound
from twinstream.schedule.workload import Workload

_PLANNED = 2
_PLANNED_IF_FAR = 4
_FAR = 1.025
_WORTH_IT_AT_FIRST = 1.004
_WORTH_IT = 1.02
_WORTH_IT_OF_MANY = 1.04
_MANY_TASKS = 1500
_MOST_BLOCKS_AT_LAST = 5000  # what would do is tried many times


@dataclass(frozen=True)
class Found:
    """A schedule with its step time as judged, its chain and its bound; not yet verified."""

    step_ns: float
    schedule: Schedule
    chain: Chain
    bound: StepBound

    def finished(self) -> Schedule:
        return finished(self.schedule, self.chain, self.bound)


class _Made(Exception):
    """A schedule is there to be judged."""


def _accept_the_first(_: Schedule) -> NoReturn:
    raise _Made


class Family:
    """The search over all admissible ways to cut a step."""

    def __init__(
        self,
        spec: ModelSpec,
        step: TrainingStep,
        machine: Machine,
        judge: Judge | None,
        choices: Choices,
        caps: Caps,
    ) -> None:
        self.spec, self.step, self.machine, self.caps, self.judge = spec, step, machine, caps, judge
        self.choices = choices
        self.cuts = Cuts(spec, step, machine, choices, caps)
        self._undecided: set[Workload] = set()  # tried, and the program's decisions do not fit

    def best(self, *, name_caps: bool = True) -> Schedule:
        """The fastest schedule found; its bound has the least of all admissible workloads.

        Raises:
            InfeasiblePlan: none fits; it says what would do, unless `name_caps` is false.
        """
        if (found := self.search()) is not None:
            return found.finished()
        resorted = self._last_resort()
        if isinstance(resorted, Schedule):
            return resorted
        raise resorted() if name_caps else self._unnamed_refusal()

    def fits(self) -> bool:
        """Whether there is a schedule; the first that is made will do."""
        family = Family(
            self.spec, self.step, self.machine, _accept_the_first, self.choices, self.caps
        )  # fmt: skip
        try:
            family.search()
        except _Made:
            return True
        return isinstance(family._last_resort(), Schedule)

    def search(self) -> "Found | None":
        """The fastest schedule found among those of the program; None if there is none."""
        try:
            return self._searched()
        finally:
            self.cuts.close()

    def _searched(self) -> "Found | None":
        cuts = list(self.cuts.usual)
        found = self._plans(cuts)
        if not found:
            cuts = list(self.cuts.all)
            found = self._plans(cuts, thorough=True)
        if not found and self._undecided:
            found = self._plans(cuts, thorough=True, outlasting=False)
        found += self._streamed(found)
        least_s = self.cuts.least_refined_s(cuts) if found else inf
        ranked = sorted(found, key=_step_ns)
        for rank, (_, cut) in enumerate(ranked):
            plan = tightest([other for other, its_cut in ranked[rank:] if its_cut is cut])
            chain = lower(self.spec, cut.workload, self.cuts.recipe)
            try:
                schedule = plan.make(chain).model_copy(update={"policy": "optimal"})
            except (InfeasiblePlan, DoesNotFit):
                continue
            return Found(plan.step_ns, schedule, chain, self._step_bound(cut, least_s))
        return None

    def _streamed(self, found: Sequence[tuple[Plan, Cut]]) -> list[tuple[Plan, Cut]]:
        """The plan of `streaming` for the best way to cut, so that it is never faster there."""
        if not found:
            return []
        best, cut = min(found, key=_step_ns)
        plans = streamed(
            self.cuts.lowered(cut.workload, JUDGED_ROUNDS), self.machine, self.caps, self.judge,
            self.choices,
            num_rounds=cut.workload.rounds_per_step, bound_s=cut.bound.step_s,
            best_ns=best.step_ns,
        )  # fmt: skip
        return [(plan, cut) for plan in plans]

    def least_s(self) -> float:
        """The least bound of all admissible workloads; infinite if there is none."""
        return self.cuts.least_refined_s(self.cuts.usual or self.cuts.all)

    def step_bound_of(self, workload: Workload) -> StepBound:
        """The bound of one workload, of which there is a plan, and the least of all."""
        cut = self.cuts.cut(self.cuts.lowered(workload, PROGRAM_ROUNDS), workload)
        assert cut is not None, "what has a plan has a bound"
        return self._step_bound(cut, min(cut.bound.step_s, self.least_s()))

    def _step_bound(self, cut: Cut, least_s: float) -> StepBound:
        bound = as_step_bound(cut.bound, least_s)
        return bound.model_copy(update={"fixed": self.choices.told})

    def _plans(
        self, cuts: list[Cut], *, thorough: bool = False, outlasting: bool = True
    ) -> list[tuple[Plan, Cut]]:
        """Plans of the cuts with the least bounds, as long as others may be faster.

        Rough bounds of `cuts` are refined where their turn comes.
        """
        found: list[tuple[Plan, Cut]] = []
        planned: list[Cut] = []
        while True:
            left = (cut for cut in cuts if cut not in planned)
            worth_it = (
                cut for cut in left if thorough or self._is_worth_it(cut, cuts, found, len(planned))
            )
            if (cut := next(worth_it, None)) is None:
                break
            if cut.rough:
                refined = self.cuts.refined(cut)
                cuts[:] = least_first([refined, *(other for other in cuts if other is not cut)])
                continue
            planned.append(cut)
            plans = optimal_plans(
                self.cuts.lowered(cut.workload, JUDGED_ROUNDS), self.machine, self.caps, self.judge,
                self.choices,
                num_rounds=cut.workload.rounds_per_step, bound_s=cut.bound.step_s,
                beat_ns=min((plan.step_ns for plan, _ in found), default=inf), thorough=thorough,
                decide=not outlasting or cut.workload not in self._undecided, outlasting=outlasting,
            )  # fmt: skip
            if not plans:
                self._undecided.add(cut.workload)
            found += [(plan, cut) for plan in plans]
        return found

    def _is_worth_it(
        self, cut: Cut, cuts: list[Cut], found: list[tuple[Plan, Cut]], tried: int
    ) -> bool:
        """Whether the best plan found is so far above a cut's bound that planning it may pay."""
        if not found:
            return True
        if self.choices.effort == "quick":
            return False
        best_s = min(plan.step_ns for plan, _ in found) / 1e9
        worth_it = _WORTH_IT_AT_FIRST if tried < _PLANNED else _WORTH_IT
        if len(cut.small.tasks) > _MANY_TASKS:
            worth_it = _WORTH_IT_OF_MANY
        if cut.bound.step_s * worth_it >= best_s:
            return False
        far = best_s > _FAR * self.cuts.least_refined_s(cuts)
        return tried < (_PLANNED_IF_FAR if far else _PLANNED)

    def _last_resort(self) -> Schedule | Callable[[], InfeasiblePlan]:
        """The plan of `streaming` for the smallest workload, or one with little on the host.

        Where neither fits, how to find out what would do, which takes longer.
        """
        workloads = self.cuts.all_workloads(JUDGED_ROUNDS, _MOST_BLOCKS_AT_LAST)
        workloads.sort(key=_size)
        streaming: InfeasiblePlan | None = None
        if self.choices.open:
            least = workloads[0]
            try:
                return self._streaming_plan(self.cuts.lowered(least, JUDGED_ROUNDS), least)
            except InfeasiblePlan as error:
                streaming = error
        least_bytes = {workload: self.cuts.least_host_bytes(workload) for workload in workloads}
        workloads.sort(key=lambda workload: least_bytes[workload])
        room = inf if self.caps.host_bytes is None else self.caps.host_bytes
        possible = [w for w in workloads if least_bytes[w] < inf and least_bytes[w] <= room]
        resort_of = cache(self._resort)
        bare = (self._bare_plan(resort_of(workload), workload) for workload in possible)
        if (schedule := next(filter(None, bare), None)) is not None:
            return schedule
        resort = resort_of(workloads[0])
        few = self.cuts.lowered(workloads[0], JUDGED_ROUNDS)
        if streaming is None:
            return partial(refused_as_fixed, few, self.caps, resort)
        search = self.choices.effort != "quick"
        return partial(refused, few, self.caps, streaming, resort, search=search)

    def _unnamed_refusal(self) -> InfeasiblePlan:
        least = min(self.cuts.all_workloads(JUDGED_ROUNDS, _MOST_BLOCKS_AT_LAST), key=_size)
        return refused_unnamed(self.cuts.lowered(least, JUDGED_ROUNDS), self.caps)

    def _resort(self, workload: Workload) -> LastResort:
        few = self.cuts.lowered(workload, JUDGED_ROUNDS)
        return LastResort(few, self.machine, self.choices, workload.rounds_per_step)

    def _streaming_plan(self, few: Chain, workload: Workload) -> Schedule:
        make = partial(streaming_plan, machine=self.machine, caps=self.caps)
        made = make(few)  # says soon that nothing fits
        chain = lower(self.spec, workload, self.cuts.recipe)
        schedule = of_all_rounds(made, make, chain).model_copy(update={"policy": "optimal"})
        return finished(schedule, chain, self.step_bound_of(workload))

    def _bare_plan(self, resort: LastResort, workload: Workload) -> Schedule | None:
        chain = cache(lambda: lower(self.spec, workload, self.cuts.recipe))
        schedule = resort.schedule(chain, self.caps)
        if schedule is None:
            return None
        return finished(schedule, chain(), self.step_bound_of(workload))


def _size(workload: Workload) -> tuple[int, int]:
    """Of a round and a chunk: the smaller, the less memory a step takes."""
    return workload.chunk_tokens * workload.chunks_per_round, workload.chunk_tokens


def _step_ns(found: tuple[Plan, Cut]) -> float:
    return found[0].step_ns
