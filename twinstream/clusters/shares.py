"""What a step's time goes to: computing, waiting for collectives, waiting for the pipeline."""

from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import Timeline


def shares_of(schedule: ClusterSchedule, timeline: ClusterTimeline) -> dict[str, float]:
    """Shares of the step, mean over all ranks: `compute`, `talk` and `bubble`; they add up to 1.

    A wait of the compute queue counts as what ended last of what its next op waited for: a
    collective is `talk`; a message, or the end of the step, `bubble`.
    """
    total = {"compute": 0.0, "talk": 0.0, "bubble": 0.0}
    for one in schedule.classes:
        ranks = schedule.num_ranks(one)
        for kind, share in _of_class(schedule.of(one), timeline.classes[one.name]).items():
            total[kind] += share * ranks / schedule.mesh.size
    return total


def _of_class(schedule: Schedule, timeline: Timeline) -> dict[str, float]:
    ends, starts = timeline.passes[-1].end_ns, timeline.passes[-1].start_ns
    position = {op.op_id: at for at, op in enumerate(schedule.ops)}
    computed = waited = 0
    free = None
    for at, op in enumerate(schedule.ops):
        if op.kind != "compute":
            continue
        computed += ends[at] - starts[at]
        if free is not None and starts[at] > free and op.waits:
            last = max((position[wait] for wait in op.waits), key=ends.__getitem__)
            by = schedule.ops[last]
            if by.kind == "communicate" and not by.shift:
                waited += starts[at] - max(free, 0)
        free = ends[at]
    step_ns = timeline.step_ns
    compute, talk = computed / step_ns, waited / step_ns
    return {"compute": compute, "talk": talk, "bubble": max(0.0, 1 - compute - talk)}
