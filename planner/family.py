"""All admissible ways to cut a step for `optimal`, and the search for the best of them."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering import lower
from twinstream.models.spec import ModelSpec
from twinstream.planner.bound import LowerBound
from twinstream.planner.bound_kept import kept_program
from twinstream.planner.choices import Choices
from twinstream.planner.chunking import TrainingStep, admissible, chunkings
from twinstream.planner.deciding import JUDGED_ROUNDS, DoesNotFit
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.kept import kept_chain
from twinstream.planner.plan import as_step_bound, finished, recipe_of, step_bound
from twinstream.planner.policies.optimal import (
    has_plan,
    optimal_plans,
    required,
    streamed,
)
from twinstream.planner.policies.streaming import plan_streaming
from twinstream.planner.refusal import refused, refused_as_fixed
from twinstream.planner.rounds import PROGRAM_ROUNDS
from twinstream.planner.turns import Plan
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule, StepBound
from twinstream.schedule.workload import Workload

_PLANNED = 2
_PLANNED_IF_FAR = 4
_FAR = 1.025
_NEAR = 1.01
_SLOW = 1.2
_HELPS = 0.995
_WORTH_IT_AT_FIRST = 1.004
_WORTH_IT = 1.02
_WORTH_IT_OF_MANY = 1.04
_MANY_TASKS = 1500
_FEW_SEGMENTS = 300
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


@dataclass(frozen=True)
class Found:
    """A schedule with its step time as judged, its chain and its bound; not yet verified."""

    step_ns: float
    schedule: Schedule
    chain: Chain
    bound: StepBound

    def finished(self) -> Schedule:
        return finished(self.schedule, self.chain, self.bound)


class Family:
    """All admissible ways to cut a step, and the search for the best."""

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
        self.recipe = recipe_of("optimal", step.recipe)
        self._impossible: set[Workload] = set()
        self._undecided: set[Workload] = set()  # tried, and the program's decisions do not fit

    def best(self) -> Schedule:
        """The fastest schedule found; its bound has the least of all admissible workloads.

        Raises:
            InfeasiblePlan: none fits.
        """
        found = self.search()
        return found.finished() if found is not None else self._last_resort()

    def search(self) -> "Found | None":
        """The fastest schedule found among those of the program; None if there is none."""
        cuts = list(self._usual)
        found = self._plans(cuts)
        if not found:
            cuts = list(self._all)
            found = self._plans(cuts, thorough=True)
        found += self._streamed(found)
        least_s = _least_s(cuts)
        ranked = sorted(found, key=_step_ns)
        for rank, (found_plan, cut) in enumerate(ranked, start=1):
            plan = found_plan.tightened(map(_step_ns, ranked[rank:]))
            chain = lower(self.spec, cut.workload, self.recipe)
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
            self._lowered(cut.workload, JUDGED_ROUNDS), self.machine, self.caps, self.judge,
            self.choices,
            num_rounds=cut.workload.rounds_per_step, bound_s=cut.bound.step_s,
            best_ns=best.step_ns,
        )  # fmt: skip
        return [(plan, cut) for plan in plans]

    def least_s(self) -> float:
        """The least bound of all admissible workloads; infinite if there is none."""
        return _least_s(self._usual or self._all)

    def step_bound_of(self, workload: Workload) -> StepBound:
        """The bound of one workload, of which there is a plan, and the least of all."""
        cut = self._cut(self._lowered(workload, PROGRAM_ROUNDS), workload)
        assert cut is not None, "what has a plan has a bound"
        return self._step_bound(cut, min(cut.bound.step_s, self.least_s()))

    def _step_bound(self, cut: Cut, least_s: float) -> StepBound:
        bound = as_step_bound(cut.bound, least_s)
        return bound.model_copy(update={"fixed": self.choices.told})

    @cached_property
    def _usual(self) -> list[Cut]:
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
        for workloads in self._others_by_size(usual):
            cuts = _least_first([*usual, *self.bounded(workloads, every=True)])
            helped = _least_s(cuts) < _HELPS * _least_s(usual)
            usual = cuts
            if not helped:
                break
        return usual

    @cached_property
    def _all(self) -> list[Cut]:
        return self._with_all_others(self._usual)

    def _with_all_others(self, cuts: list[Cut]) -> list[Cut]:
        """With smaller chunks, too, and whatever else is possible at all."""
        others = [w for workloads in self._others_by_size(cuts) for w in workloads]
        return _least_first([*cuts, *self.bounded(others, every=True)])

    def _others_by_size(self, cuts: Sequence[Cut]) -> list[list[Workload]]:
        """What may be possible beside these, by the size of chunks, the largest first."""
        workloads = [*admissible(self.spec, self.step), *chunkings(self.spec, self.step)]
        known = self._impossible.union(cut.workload for cut in cuts)
        by_size: dict[int, list[Workload]] = {}
        for workload in dict.fromkeys(workloads):
            if workload not in known:
                by_size.setdefault(workload.chunk_tokens, []).append(workload)
        return [by_size[size] for size in sorted(by_size, reverse=True)]

    def bounded(self, workloads: Sequence[Workload], *, every: bool = False) -> list[Cut]:
        """Those of the workloads that have a bound, the least first.

        Left out, unless `every` is wanted, are those whose tasks alone take longer than the bound
        of another. All others are bounded with few segments; with many, those that may turn out
        to have the least.
        """
        if not workloads:
            return []
        self.choices.check(self._lowered(workloads[0], 1))
        first = self._cut(self._lowered(workloads[0], PROGRAM_ROUNDS), workloads[0], _FEW_SEGMENTS)
        least_s = inf if first is None else first.bound.step_s

        def roughly(workload: Workload) -> Cut | None:
            small = self._lowered(workload, PROGRAM_ROUNDS)
            if not every and self._alone_s(small, workload) >= least_s:
                return None
            return self._cut(small, workload, _FEW_SEGMENTS)

        with ThreadPoolExecutor(_SOLVERS) as pool:
            rough = _least_first([first, *pool.map(roughly, workloads[1:])])
            if not rough:
                return []
            if self.choices.effort == "quick":
                return [replace(cut, rough=False) for cut in rough]
            best = self._refined(rough[0])
            least_s = inf if best is None else best.bound.step_s
            left = [cut for cut in rough[1:] if cut.bound.step_s >= least_s]
            again = [cut for cut in rough[1:] if cut.bound.step_s < least_s]
            return _least_first([best, *pool.map(self._refined, again), *left])

    def _refined(self, cut: Cut) -> Cut | None:
        """With the bound of as many segments as it takes; None where that says nothing fits."""
        return self._cut(cut.small, cut.workload) if cut.rough else cut

    def _cut(
        self, small: Chain, workload: Workload, most_segments: int | None = None
    ) -> Cut | None:
        program = kept_program(
            small, self.machine, num_rounds=workload.rounds_per_step, choices=self.choices,
            most_segments=most_segments,
        )  # fmt: skip
        bound = program.bound(self.caps)
        if bound is None:
            self._impossible.add(workload)
            return None
        together = max(bound.segment_of_task) + 1 < len(small.tasks)
        return Cut(workload, small, bound, rough=together and most_segments is not None)

    def _plans(self, cuts: list[Cut], *, thorough: bool = False) -> list[tuple[Plan, Cut]]:
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
                refined = self._refined(cut)
                cuts[:] = _least_first([refined, *(other for other in cuts if other is not cut)])
                continue
            planned.append(cut)
            plans = optimal_plans(
                self._lowered(cut.workload, JUDGED_ROUNDS), self.machine, self.caps, self.judge,
                self.choices,
                num_rounds=cut.workload.rounds_per_step, bound_s=cut.bound.step_s,
                beat_ns=min((plan.step_ns for plan, _ in found), default=inf), thorough=thorough,
                at_home=bool(found) and min(found, key=_step_ns)[0].at_home,
                decide=cut.workload not in self._undecided,
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
        far = best_s > _FAR * min(cut.bound.step_s for cut in cuts)
        return tried < (_PLANNED_IF_FAR if far else _PLANNED)

    def _lowered(self, workload: Workload, most_rounds: int) -> Chain:
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

    def _last_resort(self) -> Schedule:
        """The plan of `streaming` for the workload that takes the least memory.

        Raises:
            InfeasiblePlan: it does not fit, either; it says what would do for that workload.
        """
        workloads = [*admissible(self.spec, self.step), *chunkings(self.spec, self.step)]
        least = min(workloads, key=lambda w: (w.chunk_tokens * w.chunks_per_round, w.chunk_tokens))
        few = self._lowered(least, JUDGED_ROUNDS)
        rounds = least.rounds_per_step
        fits = partial(has_plan, few, self.machine, required(self.judge), self.choices, rounds)
        if not self.choices.open:
            raise refused_as_fixed(few, self.caps, fits)
        try:
            plan_streaming(few, self.machine, self.caps)
        except InfeasiblePlan as error:
            search = None if self.choices.effort == "quick" else fits
            raise refused(few, self.caps, error, search) from None
        chain = lower(self.spec, least, self.recipe)
        schedule = plan_streaming(chain, self.machine, self.caps)
        schedule = schedule.model_copy(update={"policy": "optimal"})
        return finished(schedule, chain, step_bound(chain, self.machine, self.caps))


def _step_ns(found: tuple[Plan, Cut]) -> float:
    return found[0].step_ns


def _least_s(cuts: Iterable[Cut]) -> float:
    return min((cut.bound.step_s for cut in cuts), default=inf)


def _least_first(cuts: Iterable[Cut | None]) -> list[Cut]:
    """By their bounds; of nearly equal ones the shorter chain first."""
    found = [cut for cut in cuts if cut is not None]
    near_s = _NEAR * _least_s(found)

    def order(cut: Cut) -> tuple[float, int]:
        length = len(cut.small.tasks) if cut.bound.step_s <= near_s else 0
        return max(cut.bound.step_s, near_s), length

    return sorted(found, key=order)
