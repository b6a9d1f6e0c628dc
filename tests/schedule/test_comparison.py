"""Predicted and measured timelines joined by op."""

import pytest

from tests.helpers.sketches import feed, op, sketch, timeline
from twinstream.schedule.analysis.comparison import Pair, compare_rank
from twinstream.schedule.ops import Label, Op
from twinstream.schedule.timeline import RankTimeline, TimelineMismatch


def lasting(ops, *passes, step_ns=100.0) -> RankTimeline:
    """Passes as lists of durations; every op starts at its position times 1000."""
    spans = ([(1000 * i, 1000 * i + ns) for i, ns in enumerate(one)] for one in passes)
    return timeline(ops, *spans, step_ns=step_ns)


def labelled(name: str, kind: str, level: str | None = None) -> Op:
    return op(name, "compute").model_copy(update={"label": Label(kind=kind, level=level)})


OPS = [
    labelled("f0", "block_forward"),
    labelled("f1", "block_forward"),
    labelled("r", "block_recompute", "INPUT"),
    op("load", "h2d"),
    feed("fill"),
]
PREDICTED = lasting(OPS, [10, 20, 30, 40, 50], step_ns=120.0)
MEASURED = lasting(OPS, [10, 30, 30, 90, 51], [14, 30, 30, 50, 51], step_ns=100.0)


def test_step_and_cold_times_are_set_side_by_side():
    found = compare_rank(sketch(OPS), PREDICTED, MEASURED)
    assert found.step_ns == Pair(predicted=120, measured=100)
    assert found.step_ns.error == pytest.approx(0.2)
    # the cold pass is the first: from the first start to the last end
    assert found.cold_ns == Pair(predicted=4050, measured=4051)


def test_of_a_busy_machine_the_error_is_of_the_time_with_a_core():
    """A step of 100 ns of which kernels had a core for 80 %: 120 / 80 - 1."""
    shares = [(0.8, 0.5), (0.95, 0.2), (None, 0.2)]
    for share, error in shares:
        provenance = MEASURED.provenance.model_copy(update={"processor_share": share})
        measured = MEASURED.model_copy(update={"provenance": provenance})
        found = compare_rank(sketch(OPS), PREDICTED, measured)
        assert found.step_ns.error == pytest.approx(error)
        assert found.step_ns.measured == 100 and (found.disturbed is None) == (error == 0.2)
        load = next(group for group in found.kinds if group.name == "copy h2d")
        assert load.busy_ns.error == pytest.approx(40 / (70 * (0.8 if error == 0.5 else 1)) - 1)


def test_busy_time_is_summed_by_kind_with_recomputes_told_by_level():
    found = {group.name: group for group in compare_rank(sketch(OPS), PREDICTED, MEASURED).kinds}
    assert {name: (g.num_ops, g.busy_ns.predicted) for name, g in found.items()} == {
        "block_forward": (2, 30),
        "block_recompute INPUT": (1, 30),
        "copy h2d": (1, 40),
        "feed host": (1, 50),
    }
    # means over the measured passes: 12 + 30, 30, 70, 51
    assert [g.busy_ns.measured for g in found.values()] == [42, 30, 70, 51]


def test_busy_time_is_summed_by_stream():
    found = compare_rank(sketch(OPS), PREDICTED, MEASURED).streams
    assert [(g.name, g.num_ops) for g in found] == [("0:compute", 3), ("0:h2d", 1), ("0:host", 1)]
    assert found[0].busy_ns == Pair(predicted=60, measured=72)


def test_the_ops_that_differ_most_come_first():
    found = compare_rank(sketch(OPS), PREDICTED, MEASURED).worst_ops
    assert [(o.op_id, o.stream) for o in found] == [
        ("load", "0:h2d"), ("f1", "0:compute"), ("f0", "0:compute"), ("fill", "0:host"),
        ("r", "0:compute"),
    ]  # fmt: skip
    assert found[0].duration_ns == Pair(predicted=40, measured=70)


def test_an_op_that_took_no_time_has_no_relative_error():
    assert Pair(predicted=3, measured=0).error == 0


@pytest.mark.parametrize("which", ["predicted", "measured"])
def test_a_timeline_of_another_schedule_is_refused(which):
    other = lasting(OPS[:-1], [1] * 4)
    timelines = {"predicted": PREDICTED, "measured": MEASURED, which: other}
    with pytest.raises(
        TimelineMismatch, match=rf"the {which} timeline has 4 ops .* 5 in its order"
    ):
        compare_rank(sketch(OPS), **timelines)
