"""Op timelines as measurements: the mean duration of each distinct call and copy of a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.hardware_profiles.calibration.fitting import Observation
from twinstream.hardware_profiles.curve_choice import efficiency_keys
from twinstream.schedule.analysis.comparison import require_timeline_of
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.timeline import Timeline

_SMALLEST = 0.001  # share of all ops' time under which a call or copy is not worth a residual
_MOST_WEIGHT = 4.0


@dataclass(frozen=True)
class OpClass:
    """Ops that cost the same: one call, or copies of one size on one queue."""

    name: str
    positions: tuple[int, ...]


def op_classes(schedule: Schedule) -> tuple[OpClass, ...]:
    """Compute ops by call and copies by queue and bytes; what the host feeds and takes is no
    kernel and is left out."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in schedule.tensors}
    members: dict[str, list[int]] = {}
    for position, op in enumerate(schedule.ops):
        if isinstance(op, Compute):
            members.setdefault(op.call, []).append(position)
        elif isinstance(op, Copy):
            parts = "" if op.num_parts is None else f", first {op.num_parts} parts"
            name = f"copy {op.stream.queue} {sizes[op.tensor]} bytes{parts}"
            members.setdefault(name, []).append(position)
    return tuple(OpClass(name, tuple(found)) for name, found in members.items())


def mean_seconds(classes: Sequence[OpClass], timeline: Timeline) -> list[float]:
    """Mean duration of each class over the timeline's passes."""
    passes = timeline.passes
    totals_ns = [
        sum(spans.end_ns[i] - spans.start_ns[i] for spans in passes for i in one.positions)
        for one in classes
    ]
    counts = [len(passes) * len(one.positions) for one in classes]
    return [total / count / 1e9 for total, count in zip(totals_ns, counts, strict=True)]


def timeline_observations(
    schedule: Schedule, timeline: Timeline
) -> tuple[tuple[OpClass, ...], tuple[Observation, ...]]:
    """The classes worth fitting and their measured mean durations.

    Classes that take under 0.1 % of the ops' time are left out. A class weighs by its share of
    the time, so that the step is what the fit gets right.

    Raises:
        TimelineMismatch: the timeline is of another schedule.
    """
    require_timeline_of(schedule, timeline, "measured")
    classes = op_classes(schedule)
    seconds = mean_seconds(classes, timeline)
    shares = [s * len(one.positions) for s, one in zip(seconds, classes, strict=True)]
    total = sum(shares)
    kept = [i for i, share in enumerate(shares) if total and share / total >= _SMALLEST]
    mean = total / len(kept) if kept else 1.0
    observations = tuple(
        Observation(
            name=classes[i].name,
            group=classes[i].name,
            measured_s=seconds[i],
            weight=min(_MOST_WEIGHT, shares[i] / mean),
        )
        for i in kept
    )
    return tuple(classes[i] for i in kept), observations


def works_of(schedule: Schedule) -> list[Work]:
    """One of each kind of work that the schedule's calls on the device do."""
    calls = [call for call in schedule.calls.values() if call.processor == "device"]
    by_keys = {efficiency_keys(work): work for call in calls for work in call.cost}
    return list(by_keys.values())
