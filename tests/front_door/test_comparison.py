"""Predicted against measured, on timelines made up by hand."""

import pytest

from tests.front_door.small_schedule import small_schedule, timeline
from twinstream.schedule.analysis.comparison import Pair, TimelineMismatch, compare

#                     h2d.w first h2d.x again d2h.x last
PREDICTED = timeline(100, 200, 100, 400, 500, 600, step_ns=1500.0)
MEASURED = timeline(200, 200, 300, 500, 500, 100, step_ns=2000.0, kind="measured")


def test_the_step_times_error_is_relative_to_what_was_measured():
    comparison = compare(small_schedule(), PREDICTED, MEASURED)
    assert comparison.step_ns.error == pytest.approx(-0.25)
    assert comparison.cold_ns == Pair(predicted=1900, measured=1800)


def test_busy_time_is_summed_by_kind_of_op():
    kinds = {group.name: group for group in compare(small_schedule(), PREDICTED, MEASURED).kinds}
    assert kinds["copy h2d"].busy_ns == Pair(predicted=200, measured=500)
    assert kinds["block_forward"].busy_ns == Pair(predicted=800, measured=300)
    assert kinds["block_recompute INPUT"].busy_ns == Pair(predicted=400, measured=500)
    assert kinds["block_forward"].num_ops == 2


def test_busy_time_is_summed_by_stream():
    streams = {g.name: g.busy_ns for g in compare(small_schedule(), PREDICTED, MEASURED).streams}
    assert streams == {
        "0:h2d": Pair(predicted=200, measured=500),
        "0:compute": Pair(predicted=1200, measured=800),
        "0:d2h": Pair(predicted=500, measured=500),
    }


def test_the_worst_ops_come_first():
    worst = compare(small_schedule(), PREDICTED, MEASURED).worst_ops
    assert [op.op_id for op in worst[:2]] == ["last", "h2d.x"]
    assert worst[0].duration_ns == Pair(predicted=600, measured=100)


def test_a_timeline_of_other_ops_is_refused():
    other = MEASURED.model_copy(update={"op_ids": ("a", "b", "c", "d", "e", "f")})
    with pytest.raises(TimelineMismatch, match="measured timeline has 6 ops"):
        compare(small_schedule(), PREDICTED, other)
    with pytest.raises(TimelineMismatch, match="predicted"):
        compare(small_schedule(), other, MEASURED)
