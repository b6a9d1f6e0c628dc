"""Predicted against measured, op by op: of one device, or of every rank and in total."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from twinstream.schedule.analysis.idle import ExchangeTimes
from twinstream.schedule.cluster.splitting import expanded
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.errors import require
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import TimeNs
from twinstream.schedule.ops import Communicate, Compute, Op
from twinstream.schedule.timeline import (
    Provenance,
    RankTimeline,
    Timeline,
    require_timeline_of,
    require_timeline_of_rank,
)

WAITED, SAID = "waited for others", "said"
BUSY_BELOW = 0.9  # of the kernels' time with a core
_NUM_WORST = 10


class Pair(Node):
    """A predicted and a measured time; `error` is predicted / measured - 1.

    `core_share` is the share of the measured time in which kernels had a core, where it was busy
    with other programs: the error is of that time.
    """

    predicted: float
    measured: float
    core_share: float = 1.0

    @property
    def error(self) -> float:
        return self.predicted / (self.measured * self.core_share) - 1.0 if self.measured else 0.0


class GroupComparison(Node):
    """Busy time of a group of ops in one pass, ns."""

    name: str
    num_ops: int
    busy_ns: Pair


class OpComparison(Node):
    """Duration of one op, ns, mean over the passes; of several ranks with the rank's name."""

    op_id: str
    stream: str
    duration_ns: Pair
    rank: str = ""


class RankComparison(Node):
    """One rank, or a class of one: what is joined op by op, as for one device.

    Of what is said an op lasts from when this rank has come until it is through; `said` has it
    apart: how long the rank waited for the others, and what came after all had come.
    """

    name: str
    comparison: "Comparison"
    said: tuple[GroupComparison, ...]


class Comparison(Node):
    """The join of a predicted and a measured timeline of one schedule.

    `kinds` add up the ops of all ranks. `streams` are of one device. `processor_share` is that of
    the measured run's `Provenance`. `worst_ops` are those whose durations differ most in
    ns. Of several `ranks`, measured clocks are right within `clock_error_ns`.
    """

    step_ns: Pair
    cold_ns: Pair
    kinds: tuple[GroupComparison, ...]
    streams: tuple[GroupComparison, ...] = ()
    worst_ops: tuple[OpComparison, ...] = ()
    processor_share: float | None = None
    ranks: tuple[RankComparison, ...] = ()
    clock_error_ns: TimeNs = 0

    @property
    def disturbed(self) -> str | None:
        """A sentence if other programs had the cores while it was measured; None if not."""
        return disturbed(self.processor_share)


def disturbed(processor_share: float | None) -> str | None:
    """A sentence if other programs had the cores for much of a measured time; None if not."""
    busy = busy_note([processor_share or 1.0])
    return busy and (
        f"{busy}; errors are of the time that they had one. Run it again with nothing beside for "
        "errors of the whole step."
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


def core_share_of(provenance: Provenance) -> float:
    """The share of a measured time that its error is of: 1 where the cores were free enough."""
    share = provenance.processor_share
    return 1.0 if share is None or share >= BUSY_BELOW else share


def compare(schedule: Schedule, predicted: Timeline, measured: Timeline) -> Comparison:
    """Join two timelines of a schedule by op id; of a mesh each rank measured with its class.

    Raises:
        TimelineMismatch: one of them has other ops than the schedule.
    """
    require("schedule", schedule, Schedule)
    require("predicted", predicted, Timeline)
    require("measured", measured, Timeline)
    if schedule.is_one_device:
        return compare_rank(schedule.only, predicted.only, measured.only)
    return _of_ranks(schedule, predicted, measured)


def by_rank(schedule: Schedule, timeline: Timeline) -> tuple[Schedule, Timeline]:
    """The same with a class for each rank where a timeline has all ranks; else as they are."""
    if not timeline.ranks:
        return schedule, timeline
    alone = timeline.model_copy(update={"classes": timeline.ranks, "ranks": {}})
    return expanded(schedule), alone


def compare_rank(
    schedule: RankSchedule, predicted: RankTimeline, measured: RankTimeline
) -> Comparison:
    """Join two timelines of one rank's schedule by op id.

    Raises:
        TimelineMismatch: one of them has other ops than the schedule.
    """
    before = _durations_ns(schedule, predicted, "predicted")
    after = _durations_ns(schedule, measured, "measured")
    order = sorted(range(len(before)), key=lambda i: (-abs(before[i] - after[i]), i))
    share = core_share_of(measured.provenance)
    return Comparison(
        processor_share=measured.provenance.processor_share,
        step_ns=Pair(predicted=predicted.step_ns, measured=measured.step_ns, core_share=share),
        cold_ns=Pair(predicted=predicted.cold_ns, measured=measured.cold_ns, core_share=share),
        kinds=_grouped(schedule, (before, after), share, kind_of),
        streams=_grouped(schedule, (before, after), share, lambda op: str(op.stream)),
        worst_ops=tuple(
            OpComparison(
                op_id=schedule.ops[i].op_id,
                stream=str(schedule.ops[i].stream),
                duration_ns=Pair(predicted=before[i], measured=after[i], core_share=share),
            )
            for i in order[:_NUM_WORST]
        ),
    )


def kind_of(op: Op) -> str:
    """The task kind of a compute op (a recompute with its level), else the op's kind and queue."""
    if isinstance(op, Compute):
        return f"{op.label.kind} {op.label.level}" if op.label.level else op.label.kind
    return f"{op.kind} {op.stream.queue}"


def _durations_ns(schedule: RankSchedule, timeline: RankTimeline, which: str) -> list[float]:
    require_timeline_of_rank(schedule, timeline, which)
    return [
        fmean(spans.end_ns[i] - spans.start_ns[i] for spans in timeline.passes)
        for i in range(len(schedule.ops))
    ]


def _grouped(
    schedule: RankSchedule,
    durations_ns: tuple[Sequence[float], Sequence[float]],
    core_share: float,
    name: Callable[[Op], str],
) -> tuple[GroupComparison, ...]:
    before, after = durations_ns
    members: dict[str, list[int]] = {}
    for i, op in enumerate(schedule.ops):
        members.setdefault(name(op), []).append(i)
    return tuple(
        GroupComparison(
            name=group,
            num_ops=len(found),
            busy_ns=Pair(
                predicted=sum(before[i] for i in found),
                measured=sum(after[i] for i in found),
                core_share=core_share,
            ),
        )
        for group, found in members.items()
    )


def _of_ranks(schedule: Schedule, predicted: Timeline, measured: Timeline) -> Comparison:
    for timeline in (predicted, measured):
        require_timeline_of(schedule, timeline)
    cut, after = by_rank(schedule, measured)
    require_timeline_of(cut, after)
    before = predicted
    if cut is not schedule:
        lines = {one.name: predicted.classes[_class_of(one.name, predicted)] for one in cut.classes}
        before = predicted.model_copy(update={"classes": lines})
    said = [_said(cut, timeline) for timeline in (before, after)]
    ranks = tuple(
        RankComparison(
            name=one.name,
            comparison=compare_rank(cut.of(one), before.classes[one.name], after.classes[one.name]),
            said=tuple(
                GroupComparison(
                    name=what,
                    num_ops=sum(isinstance(op, Communicate) for op in cut.of(one).ops),
                    busy_ns=Pair(predicted=said[0][number][at], measured=said[1][number][at]),
                )
                for at, what in enumerate((WAITED, SAID))
            ),
        )
        for number, one in enumerate(cut.classes)
    )
    worst = [
        op.model_copy(update={"rank": one.name}) for one in ranks for op in one.comparison.worst_ops
    ]
    worst.sort(key=lambda op: -abs(op.duration_ns.predicted - op.duration_ns.measured))
    share = core_share_of(measured.provenance)
    return Comparison(
        processor_share=measured.provenance.processor_share,
        step_ns=Pair(predicted=predicted.step_ns, measured=measured.step_ns, core_share=share),
        cold_ns=Pair(predicted=predicted.cold_ns, measured=measured.cold_ns, core_share=share),
        ranks=ranks,
        kinds=_total([*_silent(one), *one.said] for one in ranks),
        worst_ops=tuple(worst[:_NUM_WORST]),
        clock_error_ns=measured.clock_error_ns,
    )


def _class_of(rank: str, predicted: Timeline) -> str:
    """Of a rank's own class, by name, the class that it comes from."""
    return max((name for name in predicted.classes if rank.startswith(name)), key=len)


def _silent(one: RankComparison) -> list[GroupComparison]:
    """Kinds of ops, but for what is said."""
    return [kind for kind in one.comparison.kinds if not kind.name.startswith("communicate ")]


def _said(schedule: Schedule, timeline: Timeline) -> list[tuple[float, float]]:
    """By class: ns of a pass that it waited in its exchanges, and that they then took."""
    begun = ExchangeTimes(schedule, timeline)
    found = []
    for number, one in enumerate(schedule.classes):
        waited = said = 0
        passes = begun.passes[number]
        for last, spans in enumerate(passes):
            for at, op in enumerate(schedule.of(one).ops):
                if isinstance(op, Communicate):
                    from_ns = min(begun.begun_ns(last, (number, at)), spans.end_ns[at])
                    waited += from_ns - spans.start_ns[at]
                    said += spans.end_ns[at] - from_ns
        found.append((waited / len(passes), said / len(passes)))
    return found


def _total(ranks: Iterable[Sequence[GroupComparison]]) -> tuple[GroupComparison, ...]:
    found: dict[str, GroupComparison] = {}
    for groups in ranks:
        for group in groups:
            known = found.get(group.name)
            if known is not None:
                busy = Pair(
                    predicted=known.busy_ns.predicted + group.busy_ns.predicted,
                    measured=known.busy_ns.measured + group.busy_ns.measured,
                    core_share=min(known.busy_ns.core_share, group.busy_ns.core_share),
                )
                group = GroupComparison(
                    name=group.name, num_ops=known.num_ops + group.num_ops, busy_ns=busy
                )
            found[group.name] = group
    return tuple(found.values())
