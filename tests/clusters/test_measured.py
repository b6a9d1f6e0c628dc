"""What ranks measured, joined: one clock, one step, a timeline for each rank."""

import pytest

from tests.helpers.cluster_sketches import cluster, talk
from tests.helpers.sketches import op
from twinstream.clusters.running.measured import measured_cluster_timeline
from twinstream.executor.ranks.clocks import ClockOffset
from twinstream.executor.ranks.rank_run import RankOutcome
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline

STAGES = cluster(
    {
        "a": [op("work", "compute"), talk("send", "send.next", ("work",))],
        "b": [talk("recv", "recv.prev"), op("work", "compute", ("recv",))],
    },
    [("a", "send"), ("b", "recv")],
)


def outcome(rank, name, ids, compute, begins, step_ns):
    """A rank of that class whose passes begin then: it computes for 30 ns, and talks for 10."""
    spans = []
    for begin in begins:
        work, said = (begin, begin + 30), (begin + 30, begin + 40)
        pairs = [work, said] if compute == 0 else [said, (begin + 40, begin + 70)]
        starts, ends = zip(*pairs, strict=True)
        spans.append(PassSpans(start_ns=starts, end_ns=ends))
    here = Provenance(kind="measured", where="here", timed_passes=len(spans))
    line = RankTimeline(
        op_ids=ids, passes=tuple(spans[1:]), cold=spans[0], step_ns=step_ns, provenance=here
    )
    return RankOutcome(
        rank=rank, class_name=name, coordinates={}, timeline=line, state={}, fetched=(),
        clock=ClockOffset(offset_ns=0, error_ns=rank), scratch_bytes=0,
    )  # fmt: skip


def outcomes(begins, steps):
    """Two ranks of each stage."""
    a, b = ("work", "send"), ("recv", "work")
    made = [("a", a, 0), ("a", a, 0), ("b", b, 1), ("b", b, 1)]
    return [
        outcome(rank, name, ids, compute, begins, step_ns)
        for rank, ((name, ids, compute), step_ns) in enumerate(zip(made, steps, strict=True))
    ]


def test_a_step_is_from_compute_s_end_to_compute_s_end_of_whoever_is_last():
    found = measured_cluster_timeline(STAGES, outcomes((0, 120, 220), (1, 1, 1, 1)), 3)
    assert found.step_ns == pytest.approx((120 + 100) / 2)
    assert found.spread_ns == pytest.approx(10)
    assert found.clock_error_ns == 3 and found.cold_ns == 70


def test_where_some_passes_were_not_timed_the_slowest_rank_says_how_long_a_step_is():
    # Of ten passes the first and the last: what lies between them is nine steps.
    found = measured_cluster_timeline(STAGES, outcomes((0, 900), (100, 101, 102, 99)), 10)
    assert found.step_ns == 102
    assert list(found.classes) == ["a", "b"] and len(found.ranks) == 4
