"""The search: relax, decide, pack, emit and simulate each promising cut, and keep the fastest."""

from collections.abc import Iterator, Sequence

from twinstream.models.lowering.lower import lower
from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.evaluator import Evaluator
from twinstream.planner.search.cut_planner import CutPlanner
from twinstream.planner.search.cuts import Cuts, StepCut
from twinstream.planner.search.knobs import Attempt
from twinstream.planner.search.tuning import fastest, tuning_path
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE

_Made = tuple[Attempt, CutPlanner]


def search(cuts: Cuts, evaluator: Evaluator) -> tuple[RankSchedule, Chain] | None:
    """Return the fastest plan found within the caps, and its chain; None where none is found."""
    made: list[_Made] = []
    for cut in promising(cuts, made):
        planner = CutPlanner(cuts, cut, evaluator)
        made += [(plan, planner) for plan in _tried(planner, _fastest(made)) if plan.simulated]
    if cuts.choices.effort == "quick" and (best := _fastest(made)) is not None:
        made += _made_of_less(cuts, evaluator, best)
    for plan, planner in sorted(made, key=lambda one: one[0].step_ns):
        chain = lower(cuts.spec, plan.workload, cuts.request.recipe)
        if (schedule := planner.schedule(plan, chain)) is not None:  # all rounds fit, too
            caps = with_library_memory(cuts.caps, chain)
            return schedule.model_copy(update={"caps": caps}), chain
    return None


def _fastest(made: Sequence[_Made]) -> Attempt | None:
    return fastest(plan for plan, _ in made)


def _tried(planner: CutPlanner, best: Attempt | None) -> list[Attempt]:
    """Return the attempts along the tuning path of a cut.

    Args:
        best: the fastest of others.
    """
    tried: list[Attempt] = []
    for knobs in tuning_path(planner, tried, best):
        tried.append(planner.attempt(knobs, tried, best))
    return tried


def _made_of_less(cuts: Cuts, evaluator: Evaluator, best: Attempt) -> Iterator[_Made]:
    """Yield quick plans of the best one's cut for less device memory, while these may be faster.

    Quick plans are simulated once, so that one for more memory may be slower than one for less.
    """
    for device_bytes in _usual_sizes_below(_taken_bytes(best)):
        less = cuts.within(device_bytes)
        bound = less.bound(best.workload)
        if bound is None or bound.step_s * 1e9 * cuts.limits.near >= best.step_ns:
            return
        planner = CutPlanner(less, StepCut(best.workload, bound), evaluator)
        tried = _tried(planner, best)
        if any(attempt.skipped for attempt in tried):  # its decisions are slower, and of less, too
            return
        plans = [attempt for attempt in tried if attempt.simulated is not None]
        yield from ((plan, planner) for plan in plans)
        best = min([best, *plans], key=lambda plan: plan.step_ns)


def _taken_bytes(plan: Attempt) -> int:
    """Return the least cap of device memory that the plan fits; 0 where there is none."""
    assert plan.simulated is not None, "it is a plan"
    schedule = plan.simulated.emitted.schedule
    cap, arena = schedule.caps.device_bytes, schedule.caps.arena_bytes("device")
    return 0 if cap is None or arena is None else cap - arena + arena_bytes(schedule, DEVICE)


def _usual_sizes_below(size_bytes: int) -> Iterator[int]:
    """Yield sizes of memories, the largest first: ... 24, 20, 16, 12, 10, 8 GiB and so on."""
    for power in range(size_bytes.bit_length(), 3, -1):
        for quarters in (6, 5, 4):  # 1.5, 1.25 and 1 times a power of two
            if (quarters << power - 2) < size_bytes:
                yield quarters << power - 2


def promising(cuts: Cuts, made: Sequence[_Made]) -> Iterator[StepCut]:
    """Yield the cuts of the least bounds, while the best plan is far enough above them.

    Where nothing fits, smaller chunks and whatever else is possible, until something does.

    Args:
        cuts: of the step.
        made: plans found so far; the caller adds to them.
    """
    limits = cuts.limits
    most = limits.frozen_cuts if cuts.is_frozen else limits.cuts
    most = 1 if cuts.choices.effort == "quick" else most
    for planned, cut in enumerate(cuts.usual):
        if (best := _fastest(made)) is not None:
            # no plan of a cut beats its bound: one that is not clearly below the best is cut off
            pays = cut.bound.step_s * 1e9 * limits.near_equal < best.step_ns
            if planned >= most or not pays:
                return
        yield cut
    if made:
        return
    tried = [cut.workload for cut in cuts.usual]
    for cut in cuts.all:
        if cut.workload not in tried:
            yield cut
        if made:
            return
