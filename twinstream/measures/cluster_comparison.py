"""Predicted against measured of a cluster: op by op for each rank measured, and in total."""

from collections.abc import Iterable, Sequence

from twinstream.schedule.analysis.comparison import Comparison, GroupComparison, Pair, compare
from twinstream.schedule.analysis.idle import ExchangeTimes
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import (
    ClusterTimeline,
    require_timeline_of_cluster,
)
from twinstream.schedule.cluster.splitting import expanded
from twinstream.schedule.errors import require
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import TimeNs
from twinstream.schedule.ops import Communicate

WAITED, SAID = "waited for others", "said"


class RankComparison(Node):
    """One rank, or a class of one: what is joined op by op, as for one device.

    Of what is said an op lasts from when this rank has come until it is through; `said` has it
    apart: how long the rank waited for the others, and what came after all had come.
    """

    name: str
    comparison: Comparison
    said: tuple[GroupComparison, ...]


class ClusterComparison(Node):
    """The join of a predicted and a measured timeline of a cluster's schedule.

    `kinds` add up the ops of all ranks. Measured clocks are right within `clock_error_ns`.
    """

    step_ns: Pair
    cold_ns: Pair
    ranks: tuple[RankComparison, ...]
    kinds: tuple[GroupComparison, ...]
    clock_error_ns: TimeNs


def by_rank(
    schedule: ClusterSchedule, timeline: ClusterTimeline
) -> tuple[ClusterSchedule, ClusterTimeline]:
    """The same with a class for each rank where a timeline has all ranks; else as they are."""
    if not timeline.ranks:
        return schedule, timeline
    alone = timeline.model_copy(update={"classes": timeline.ranks, "ranks": {}})
    return expanded(schedule), alone


def compare_cluster(
    schedule: ClusterSchedule, predicted: ClusterTimeline, measured: ClusterTimeline
) -> ClusterComparison:
    """Join two timelines of a cluster's schedule: each rank measured with its class predicted.

    Raises:
        TimelineMismatch: one of them is of another schedule.
    """
    require("schedule", schedule, ClusterSchedule)
    for timeline in (predicted, measured):
        require_timeline_of_cluster(schedule, timeline)
    cut, after = by_rank(schedule, measured)
    require_timeline_of_cluster(cut, after)
    before = predicted
    if cut is not schedule:
        lines = {one.name: predicted.classes[_class_of(one.name, predicted)] for one in cut.classes}
        before = predicted.model_copy(update={"classes": lines})
    said = [_said(cut, timeline) for timeline in (before, after)]
    ranks = tuple(
        RankComparison(
            name=one.name,
            comparison=compare(cut.of(one), before.classes[one.name], after.classes[one.name]),
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
    return ClusterComparison(
        step_ns=Pair(predicted=predicted.step_ns, measured=measured.step_ns),
        cold_ns=Pair(predicted=predicted.cold_ns, measured=measured.cold_ns),
        ranks=ranks,
        kinds=_total([*_silent(one), *one.said] for one in ranks),
        clock_error_ns=measured.clock_error_ns,
    )


def _class_of(rank: str, predicted: ClusterTimeline) -> str:
    """Of a rank's own class, by name, the class that it comes from."""
    return max((name for name in predicted.classes if rank.startswith(name)), key=len)


def _silent(one: RankComparison) -> list[GroupComparison]:
    """Kinds of ops, but for what is said."""
    return [kind for kind in one.comparison.kinds if not kind.name.startswith("communicate ")]


def _said(schedule: ClusterSchedule, timeline: ClusterTimeline) -> list[tuple[float, float]]:
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
                )
                group = GroupComparison(
                    name=group.name, num_ops=known.num_ops + group.num_ops, busy_ns=busy
                )
            found[group.name] = group
    return tuple(found.values())
