"""The timeline of a cluster as its ranks have measured it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from twinstream.schedule.analysis.periodic import LAST_PASSES
from twinstream.schedule.cluster.splitting import expanded
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline, Timeline

if TYPE_CHECKING:
    from twinstream.executor.ranks.rank_run import RankOutcome


def measured_cluster_timeline(
    schedule: Schedule, outcomes: Sequence[RankOutcome], num_passes: int
) -> Timeline:
    """One timeline of all ranks, by rank 0's clock.

    Of each class it has its first rank, and all ranks beside where a class has several. A step is
    from the end of the last compute of any rank to that of the next step, mean over the last ones;
    where not all of the `num_passes` were timed op by op, it is that of the slowest rank alone.
    """
    classes: dict[str, RankTimeline] = {}
    for one in outcomes:
        classes.setdefault(one.class_name, one.timeline)
    ranks: dict[str, RankTimeline] = {}
    if len(classes) < len(outcomes):
        ranks = dict(zip(rank_names(schedule), (one.timeline for one in outcomes), strict=True))
    own = {one.name: schedule.of(one) for one in schedule.classes}
    step_ns, spread_ns = _step(
        [(own[one.class_name], one.timeline) for one in outcomes], num_passes
    )
    colds = [one.timeline.cold for one in outcomes]
    return Timeline(
        classes=classes,
        ranks=ranks,
        step_ns=step_ns,
        spread_ns=spread_ns,
        cold_ns=max(max(c.end_ns) for c in colds) - min(min(c.start_ns) for c in colds),
        clock_error_ns=max(map(_clock_error_ns, outcomes)),
        provenance=_provenance(outcomes),
    )


def rank_names(schedule: Schedule) -> list[str]:
    """By rank, the name of its class in the schedule that has a class for each."""
    mesh = schedule.mesh
    names = [""] * mesh.size
    for one in expanded(schedule).classes:
        place = {axis.name: one.cell(axis.name, axis.size)[0] for axis in mesh.axes}
        names[mesh.rank(place)] = one.name
    return names


def _step(
    parts: Sequence[tuple[RankSchedule, RankTimeline]], num_passes: int
) -> tuple[float, float]:
    """Mean and standard deviation; the slowest rank's own where not every pass was timed."""
    count = num_passes - 1
    if count > 0 and all(line.provenance.timed_passes == num_passes for _, line in parts):
        ends = [
            max(_end_ns(part, [line.cold, *line.passes][at]) for part, line in parts)
            for at in range(count + 1)
        ]
        steps = [after - before for before, after in pairwise(ends)][-LAST_PASSES:]
        return fmean(steps), pstdev(steps)
    slowest = max((line for _, line in parts), key=lambda line: line.step_ns)
    return slowest.step_ns, slowest.spread_ns


def _end_ns(schedule: RankSchedule, spans: PassSpans) -> int:
    """Of the last compute op."""
    return max(
        (spans.end_ns[at] for at, op in enumerate(schedule.ops) if isinstance(op, Compute)),
        default=max(spans.end_ns, default=0),
    )


def _clock_error_ns(one: RankOutcome) -> int:
    """Of the rank's host from rank 0's, and of its device from its host."""
    return one.clock.error_ns + (one.timeline.provenance.clock_error_ns or 0)


def _provenance(outcomes: Sequence[RankOutcome]) -> Provenance:
    first = outcomes[0].timeline.provenance
    shares = [one.timeline.provenance.processor_share for one in outcomes]
    known = [share for share in shares if share is not None]
    error_us = max(map(_clock_error_ns, outcomes)) / 1e3
    return first.model_copy(
        update={
            "detail": f"{first.detail}; {len(outcomes)} ranks, clocks by the shortest of 16 round "
            f"trips, right within {error_us:.0f} us",
            "processor_share": min(known) if known else None,
            "host_cost": None,
            "clock_error_ns": None,
        }
    )
