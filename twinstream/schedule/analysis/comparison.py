"""Predicted against measured, op by op."""

from collections.abc import Callable, Sequence
from statistics import fmean

from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import require
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Compute, Op
from twinstream.schedule.timeline import Timeline, require_timeline_of

BUSY_BELOW = 0.9  # of the kernels' time with a core
_NUM_WORST = 10


class Pair(Node):
    """A predicted and a measured figure; `error` is predicted / measured - 1."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0 if self.measured else 0.0


class GroupComparison(Node):
    """Busy time of a group of ops in one pass, ns."""

    name: str
    num_ops: int
    busy_ns: Pair


class OpComparison(Node):
    """Duration of one op, ns, mean over the passes."""

    op_id: str
    stream: str
    duration_ns: Pair


class Comparison(Node):
    """The join of a predicted and a measured timeline of one schedule.

    `worst_ops` are those whose durations differ most in ns. `processor_share` is that of the
    measured run's `Provenance`.
    """

    step_ns: Pair
    cold_ns: Pair
    kinds: tuple[GroupComparison, ...]
    streams: tuple[GroupComparison, ...]
    worst_ops: tuple[OpComparison, ...]
    processor_share: float | None = None

    @property
    def disturbed(self) -> str | None:
        """A sentence if other programs had the cores while it was measured; None if not."""
        busy = busy_note([self.processor_share or 1.0])
        return busy and (
            f"{busy}, and the rest counts as error. Run it again with nothing beside for errors "
            "that are the model's."
        )


def busy_note(shares: Sequence[float]) -> str | None:
    """Return how much of their time kernels had a core; None where it was nearly all.

    >>> busy_note([0.95]), busy_note([0.5, 0.5])
    (None, 'The machine was busy: kernels had a core for 50% of their time')
    """
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    if min(shares) >= BUSY_BELOW:
        return None
    share = low if low == high else f"{low} to {high}"
    return f"The machine was busy: kernels had a core for {share} of their time"


def compare(schedule: Schedule, predicted: Timeline, measured: Timeline) -> Comparison:
    """Join two timelines of a schedule by op id.

    Raises:
        TimelineMismatch: one of them has other ops than the schedule.
    """
    require("schedule", schedule, Schedule)
    require("predicted", predicted, Timeline)
    require("measured", measured, Timeline)
    before = _durations_ns(schedule, predicted, "predicted")
    after = _durations_ns(schedule, measured, "measured")
    order = sorted(range(len(before)), key=lambda i: (-abs(before[i] - after[i]), i))
    return Comparison(
        processor_share=measured.provenance.processor_share,
        step_ns=Pair(predicted=predicted.step_ns, measured=measured.step_ns),
        cold_ns=Pair(predicted=predicted.cold_ns, measured=measured.cold_ns),
        kinds=_grouped(schedule, before, after, kind_of),
        streams=_grouped(schedule, before, after, lambda op: str(op.stream)),
        worst_ops=tuple(
            OpComparison(
                op_id=schedule.ops[i].op_id,
                stream=str(schedule.ops[i].stream),
                duration_ns=Pair(predicted=before[i], measured=after[i]),
            )
            for i in order[:_NUM_WORST]
        ),
    )


def kind_of(op: Op) -> str:
    """The task kind of a compute op (a recompute with its level), else the op's kind and queue."""
    if isinstance(op, Compute):
        return f"{op.label.kind} {op.label.level}" if op.label.level else op.label.kind
    return f"{op.kind} {op.stream.queue}"


def _durations_ns(schedule: Schedule, timeline: Timeline, which: str) -> list[float]:
    require_timeline_of(schedule, timeline, which)
    return [
        fmean(spans.end_ns[i] - spans.start_ns[i] for spans in timeline.passes)
        for i in range(len(schedule.ops))
    ]


def _grouped(
    schedule: Schedule, before: Sequence[float], after: Sequence[float], name: Callable[[Op], str]
) -> tuple[GroupComparison, ...]:
    members: dict[str, list[int]] = {}
    for i, op in enumerate(schedule.ops):
        members.setdefault(name(op), []).append(i)
    return tuple(
        GroupComparison(
            name=group,
            num_ops=len(found),
            busy_ns=Pair(
                predicted=sum(before[i] for i in found), measured=sum(after[i] for i in found)
            ),
        )
        for group, found in members.items()
    )
