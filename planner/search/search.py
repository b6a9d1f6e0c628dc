"""The search: for each promising cut of the step relax, decide, pack, emit and judge."""

from collections.abc import Iterator, Sequence

from twinstream.models.lowering.lower import lower
from twinstream.planner.judge import Judge
from twinstream.planner.search.cuts import Cut, Cuts
from twinstream.planner.search.knobs import Attempt
from twinstream.planner.search.tuning import fastest, tuning_path
from twinstream.planner.search.workbench import Workbench
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Schedule


def search(cuts: Cuts, judge: Judge) -> tuple[Schedule, Chain] | None:
    """The fastest plan found within the caps, and its chain; None where none is found."""
    plans: list[Attempt] = []
    for cut in promising(cuts, plans):
        bench, best = Workbench(cuts, cut, judge), fastest(plans)
        tried: list[Attempt] = []
        for knobs in tuning_path(bench, tried, best):
            tried.append(bench.attempt(knobs, tried, best))
        plans += [attempt for attempt in tried if attempt.judged is not None]
    for plan in sorted(plans, key=lambda plan: plan.step_ns):
        chain = lower(cuts.spec, plan.workload, cuts.request.recipe)
        bench = Workbench(cuts, Cut(plan.workload, cuts.bound_of(plan.workload)), judge)
        if (schedule := bench.schedule(plan, chain)) is not None:  # all rounds fit, too
            return schedule, chain
    return None


def promising(cuts: Cuts, plans: Sequence[Attempt]) -> Iterator[Cut]:
    """The cuts with the least bounds, while the best plan is so far above them that it may pay.

    Where nothing fits, smaller chunks and whatever else is possible, until something does.

    Args:
        cuts: of the step.
        plans: those found so far; the caller adds to them.
    """
    limits = cuts.limits
    most = limits.frozen_cuts if cuts.is_frozen else limits.cuts
    most = 1 if cuts.choices.effort == "quick" else most
    for planned, cut in enumerate(cuts.usual):
        if (best := fastest(plans)) is not None:
            pays = cut.bound.step_s * 1e9 * limits.near_equal < best.step_ns
            if planned >= most or not pays:
                return
        yield cut
    if plans:
        return
    tried = [cut.workload for cut in cuts.usual]
    for cut in cuts.all:
        if cut.workload not in tried:
            yield cut
        if plans:
            return
