"""The search: for each promising cut of the step relax, decide, pack, emit and judge."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from twinstream.models.lowering.lower import lower
from twinstream.planner.judge import Judge
from twinstream.planner.search.cuts import Cut, Cuts
from twinstream.planner.search.knobs import Attempt
from twinstream.planner.search.tuning import tuning_path
from twinstream.planner.search.workbench import Workbench
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Schedule


@dataclass(frozen=True)
class Plan:
    """An attempt on a cut that was judged."""

    bench: Workbench
    attempt: Attempt

    @property
    def step_ns(self) -> float:
        return self.attempt.step_ns


@dataclass(frozen=True)
class Found:
    """The fastest plan with all its rounds, and its chain; not yet proven."""

    schedule: Schedule
    chain: Chain
    cut: Cut


def search(cuts: Cuts, judge: Judge) -> Found | None:
    """The fastest plan found within the caps; None where the program finds none."""
    plans: list[Plan] = []
    for cut in promising(cuts, plans):
        bench, tried = Workbench(cuts, cut, judge), []
        best = min(plans, key=_step_ns, default=None)
        best = None if best is None else best.attempt
        for knobs in tuning_path(bench, tried, best):
            tried.append(bench.attempt(knobs, tried, inf if best is None else best.step_ns))
        plans += [Plan(bench, attempt) for attempt in tried if attempt.judged is not None]
    return next(filter(None, map(_with_all_rounds, sorted(plans, key=_step_ns))), None)


def promising(cuts: Cuts, plans: Sequence[Plan]) -> Iterator[Cut]:
    """The cuts with the least bounds, while the best plan is so far above them that it may pay.

    Where nothing fits, smaller chunks and whatever else is possible, until something does.

    Args:
        cuts: of the step.
        plans: those found so far; the caller adds to them.
    """
    limits = cuts.limits
    most = 1 if cuts.choices.effort == "quick" else limits.cuts
    for planned, cut in enumerate(cuts.in_turn(cuts.usual)):
        if plans and (planned >= most or not _is_worth_it(cut, cuts, _best_ns(plans))):
            return
        yield cut
    if plans:
        return
    tried = {cut.workload for cut in cuts.usual}
    for cut in cuts.in_turn([cut for cut in cuts.all if cut.workload not in tried]):
        yield cut
        if plans:
            return


def _is_worth_it(cut: Cut, cuts: Cuts, best_ns: float) -> bool:
    limits = cuts.limits
    is_long = len(cuts.view(cut.workload, most_rounds=3).chain.tasks) > limits.long_tasks
    worth_it = limits.worth_a_long_plan if is_long else limits.worth_a_plan
    return cut.bound.step_s * 1e9 * worth_it < best_ns


def _step_ns(plan: Plan) -> float:
    return plan.step_ns


def _best_ns(plans: Sequence[Plan]) -> float:
    return min((plan.step_ns for plan in plans), default=inf)


def _with_all_rounds(plan: Plan) -> Found | None:
    """None where all rounds do not fit after all."""
    cuts, cut = plan.bench.cuts, plan.bench.cut
    chain = lower(cuts.spec, cut.workload, cuts.request.recipe)
    schedule = plan.bench.schedule(plan.attempt, chain)
    return None if schedule is None else Found(schedule, chain, cut)
