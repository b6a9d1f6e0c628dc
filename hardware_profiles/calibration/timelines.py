"""Op timelines as measurements: the mean duration of each distinct call and copy of a schedule."""

from twinstream.hardware_profiles.calibration.fitting import Observation
from twinstream.hardware_profiles.curve_choice import efficiency_keys
from twinstream.schedule.cost import Work
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.timeline import RankTimeline, require_timeline_of_rank

_SMALLEST = 0.001  # share of all ops' time under which a call or copy is not worth a residual
_MOST_WEIGHT = 4.0


# Positions of ops that cost the same, by name: one call, or copies of one size on one queue.
OpClasses = dict[str, list[int]]


def op_classes(schedule: RankSchedule) -> OpClasses:
    """Compute ops by call and copies by queue and bytes; what the host feeds and takes is no
    kernel and is left out."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in schedule.tensors}
    classes: OpClasses = {}
    for position, op in enumerate(schedule.ops):
        if isinstance(op, Compute):
            classes.setdefault(op.call, []).append(position)
        elif isinstance(op, Copy):
            parts = "" if op.num_parts is None else f", first {op.num_parts} parts"
            name = f"copy {op.stream.queue} {sizes[op.tensor]} bytes{parts}"
            classes.setdefault(name, []).append(position)
    return classes


def mean_seconds(classes: OpClasses, timeline: RankTimeline) -> list[float]:
    """Mean duration of each class over the timeline's passes."""
    passes = timeline.passes
    found = []
    for positions in classes.values():
        total_ns = sum(s.end_ns[i] - s.start_ns[i] for s in passes for i in positions)
        found.append(total_ns / (len(passes) * len(positions)) / 1e9)
    return found


def timeline_observations(
    schedule: RankSchedule, timeline: RankTimeline
) -> tuple[OpClasses, list[Observation]]:
    """The classes worth fitting and their measured mean durations.

    Classes that take under 0.1 % of the ops' time are left out. A class weighs by its share of
    the time, so that the step is what the fit gets right.

    Raises:
        TimelineMismatch: the timeline is of another schedule.
    """
    require_timeline_of_rank(schedule, timeline, "measured")
    classes = op_classes(schedule)
    means_s = dict(zip(classes, mean_seconds(classes, timeline), strict=True))
    shares = {name: means_s[name] * len(positions) for name, positions in classes.items()}
    total = sum(shares.values())
    kept = {n: classes[n] for n, share in shares.items() if total and share / total >= _SMALLEST}
    mean = total / len(kept) if kept else 1.0
    return kept, [
        Observation(name, name, means_s[name], weight=min(_MOST_WEIGHT, shares[name] / mean))
        for name in kept
    ]


def works_of(schedule: RankSchedule) -> list[Work]:
    """One of each kind of work that the schedule's calls on the device do."""
    calls = [call for call in schedule.calls.values() if call.processor == "device"]
    by_keys = {efficiency_keys(work): work for call in calls for work in call.cost}
    return list(by_keys.values())
