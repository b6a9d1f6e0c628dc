"""The timeline of a run: when ops ran, the time of a step, and where and how it was measured."""

from itertools import pairwise
from statistics import fmean, pstdev

from twinstream.executor.replay.dispatch import Passes
from twinstream.models.kernel_costs.attention_limits import nondeterministic_kernels
from twinstream.schedule.analysis.periodic import LAST_PASSES
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.timeline import Provenance, RankTimeline


def measured_timeline(
    schedule: RankSchedule, passes: Passes, provenance: Provenance
) -> RankTimeline:
    """Step time as in simulated timelines; measured states hardly ever repeat exactly.

    It is the mean over the last passes after the first. Where some of them were not timed op by
    op, those alone count, so that timing cannot lengthen what it measures.
    """
    timed = [found.spans for found in passes.times if found.spans is not None]
    steady = timed[1:] if len(timed) > 1 else timed
    cold = timed[0]
    if len(passes.times) > 1:
        steps_ns = _steps_ns(passes)
        step_ns, spread_ns = fmean(steps_ns), pstdev(steps_ns)
    else:
        step_ns, spread_ns = float(max(cold.end_ns) - min(cold.start_ns)), 0.0
    return RankTimeline(
        op_ids=tuple(op.op_id for op in schedule.ops),
        passes=tuple(steady),
        cold=cold,
        step_ns=step_ns,
        spread_ns=spread_ns,
        provenance=provenance.model_copy(
            update={
                "timed_passes": len(timed),
                "host_cost": passes.host_cost,
                "clock_error_ns": passes.clock_error_ns,
                "nondeterministic": nondeterministic_kernels(schedule),
            }
        ),
    )


def _steps_ns(passes: Passes) -> list[int]:
    """From the end of a pass to the end of the next, without rests, of the last passes."""
    # A rest is timed by the host: what it says beyond the device's clock is no time of a step.
    steps_ns = [
        max(1, after.end_ns - before.end_ns - passes.rests_ns.get(number, 0))
        for number, (before, after) in enumerate(pairwise(passes.times), start=1)
    ]
    untimed = [ns for ns, found in zip(steps_ns, passes.times[1:], strict=True) if not found.spans]
    return (untimed or steps_ns)[-LAST_PASSES:]
