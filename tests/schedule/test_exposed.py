"""Idle compute of hand-drawn clusters, put down to what it waited for."""

import pytest

from tests.helpers.cluster_sketches import cluster, cluster_timeline, talk
from tests.helpers.sketches import feed, op, sketch, timeline
from twinstream.schedule.analysis.idle import (
    CAUSES,
    cause_of,
    exposed_communication,
    exposed_times,
    idle_by_queue,
    idle_intervals,
    mean_fractions,
    shares_of,
)
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import Timeline, TimelineMismatch


def causes(ops, *passes, exchanges=()):
    """Of a single class, its causes; that all adds up is checked here."""
    schedule = cluster({"a": ops}, *exchanges)
    (found,) = exposed_times(schedule, cluster_timeline(schedule, {"a": passes}))
    assert found.compute_ns + sum(found.causes_ns.values()) == found.step_ns
    assert list(found.causes_ns) == [name for name in CAUSES if name in found.causes_ns]
    return found.step_ns, found.compute_ns, found.causes_ns


def test_a_collective_is_exposed_only_where_nothing_computes():
    ops = [
        op("a", "compute"),
        talk("sum", "tp", ("a",)),
        op("beside", "compute"),
        op("b", "compute", ("sum",)),
    ]
    first = [(0, 10), (10, 40), (10, 25), (40, 50)]
    second = [(50, 60), (60, 90), (60, 75), (92, 100)]
    # From 50 to 100: compute 10 + 15 + 8, tp from 75 to 90, then 2 of latency.
    assert causes(ops, first, second) == (50, 33, {"tp": 15, "latency": 2})


def test_what_a_collective_itself_waited_for_is_the_cause_of_its_part():
    ops = [
        op("a", "compute"),
        op("load", "h2d"),
        talk("gather", "tp", ("load",)),
        op("b", "compute", ("gather",)),
    ]
    first = [(0, 10), (0, 30), (30, 50), (50, 60)]
    second = [(60, 70), (60, 90), (93, 110), (110, 120)]
    assert causes(ops, first, second) == (60, 20, {"tp": 17, "copy": 20, "latency": 3})


@pytest.mark.parametrize(
    ("queue", "axes", "cause"),
    [
        ("dp", ("dp", "ep", "cp"), "dp"),
        ("dp.gather", ("dp",), "dp"),
        ("dp", ("ep", "cp"), "dp"),
        ("anything", ("ep",), "ep"),
        ("dp", ("cp",), "cp"),
        ("norm", ("pp", "dp", "tp"), "all_ranks"),
        ("norm", ("dp", "tp"), "all_ranks"),
        ("norm", ("pp",), "all_ranks"),
    ],
)
def test_a_collective_belongs_to_its_axes_whatever_its_queue_is_called(queue, axes, cause):
    assert cause_of(talk("x", queue, axes=axes)) == cause


def test_messages_belong_to_the_pipeline_or_to_their_axis():
    assert cause_of(talk("x", "send.next")) == "transfer"
    ring = talk("x", "cp.send", collective="send", axes=("cp",), shift=1)
    assert cause_of(ring) == "cp"


def test_a_pass_alone_begins_with_its_first_op_and_the_host_is_a_cause():
    ops = [feed("fill"), op("a", "compute", ("fill",))]
    assert causes(ops, [(5, 25), (25, 30)]) == (25, 5, {"host": 20})


def two_stages():
    """Stage `a` computes and sends; stage `b` receives, gathers over tp and computes."""
    return cluster(
        {
            "a": [op("a", "compute"), talk("send", "send.next", ("a",))],
            "b": [
                talk("recv", "recv.prev"),
                talk("gather", "tp", ("recv",)),
                op("b", "compute", ("gather",), ("b",)),
            ],
        },
        [("a", "send"), ("b", "recv")],
        [("b", "gather")],
    )


def test_a_message_is_a_bubble_until_its_peer_sends_and_then_a_transfer():
    schedule = two_stages()
    passes = {
        "a": [[(0, 40), (40, 50)], [(40, 80), (80, 90)]],
        "b": [[(0, 50), (50, 53), (53, 60)], [(50, 90), (90, 94), (94, 100)]],
    }
    first, second = exposed_times(schedule, cluster_timeline(schedule, passes))
    assert (first.step_ns, first.compute_ns, first.causes_ns) == (40, 40, {})
    # From 60 to 100: the peer sends at 80, the message is there at 90, gathered at 94.
    assert (second.step_ns, second.compute_ns) == (40, 6)
    assert second.causes_ns == {"tp": 4, "transfer": 10, "bubble": 20}


def test_ranks_that_come_late_to_a_collective_are_a_cause_of_their_own():
    def ops(name):
        return [op(f"{name}1", "compute"), talk("sum", "dp", (f"{name}1",)),
                op(f"{name}2", "compute", ("sum",))]  # fmt: skip

    schedule = cluster({"a": ops("a"), "b": ops("b")}, [("a", "sum"), ("b", "sum")])
    passes = {
        "a": [[(0, 10), (10, 40), (40, 50)]],
        "b": [[(0, 30), (30, 40), (40, 50)]],
    }
    fast, slow = exposed_times(schedule, cluster_timeline(schedule, passes))
    assert fast.causes_ns == {"dp": 10, "late_ranks": 20}
    assert slow.causes_ns == {"dp": 10}


def test_a_class_that_sends_to_itself_waits_for_its_own_later_side():
    ops = [
        op("a", "compute"),
        op("load", "h2d"),
        talk("out", "cp.send", ("load",), collective="send", axes=("cp",), shift=1),
        talk("in", "cp.recv", collective="recv", axes=("cp",), shift=-1),
        op("b", "compute", ("in",)),
    ]
    spans = [(0, 10), (0, 30), (30, 44), (0, 44), (44, 50)]
    exchanges = ([("a", "out"), ("a", "in")],)
    assert causes(ops, spans, exchanges=exchanges) == (50, 16, {"cp": 14, "copy": 20})


def test_a_wait_into_the_pass_before_is_followed_there():
    ops = [op("a", "compute", (), ("gather",)), talk("gather", "dp.gather", ("a",), axes=("dp",))]
    first, second = [(0, 10), (10, 50)], [(52, 60), (60, 100)]
    assert causes(ops, first, second) == (50, 8, {"dp": 40, "latency": 2})


def test_the_mean_is_over_ranks_and_shares_add_up():
    schedule = two_stages()
    passes = {
        "a": [[(0, 40), (40, 50)]],
        "b": [[(0, 50), (50, 53), (53, 60)]],
    }
    found = exposed_times(schedule, cluster_timeline(schedule, passes))
    found = (found[0].model_copy(update={"num_ranks": 6}), found[1])
    mean = mean_fractions(found)
    step_ns = (6 * 40 + 2 * 60) / 8
    assert mean["compute"] == pytest.approx((6 * 40 + 2 * 7) / 8 / step_ns)
    assert mean["bubble"] == pytest.approx(2 * 40 / 8 / step_ns)
    assert sum(mean.values()) == pytest.approx(1)
    assert sum(found[1].fractions.values()) == pytest.approx(1)
    assert exposed_communication(mean) == mean["tp"]


def test_one_device_is_explained_by_the_same_rule_and_by_its_queues():
    ops = [op("a", "compute"), op("load", "h2d"), op("b", "compute", ("load",))]
    one = Schedule.of_rank(sketch(ops))
    line = Timeline.of_rank(timeline(ops, [(0, 10), (0, 18), (20, 40)]))
    (found,) = exposed_times(one, line)
    assert (found.name, found.num_ranks, found.step_ns) == ("the device", 1, 40)
    assert found.causes_ns == {"copy": 8, "latency": 2}
    assert shares_of([exposed_times(one, line)]) == {"compute": 0.75, "copy": 0.2, "latency": 0.05}
    more = Timeline.of_rank(
        timeline(ops, [(0, 10), (0, 28), (30, 50)])
    )  # another 10 ns of the copy
    whole_ns = 50 + 3 * 10
    shares = shares_of([exposed_times(one, each) for each in (line, more)], further=3)
    assert shares == {"compute": 30 / whole_ns, "copy": 48 / whole_ns, "latency": 2 / whole_ns}
    assert idle_by_queue(idle_intervals(one, line)) == {"latency": 2, "h2d": 8}
    alone = cluster_timeline(cluster({"a": ops}), {"a": [[(0, 10), (0, 18), (20, 40)]]})
    (same,) = exposed_times(cluster({"a": ops}), alone)
    assert same.causes_ns == found.causes_ns


def test_a_timeline_of_another_schedule_is_refused():
    schedule = two_stages()
    other = cluster({"a": [op("a", "compute")]})
    line = cluster_timeline(other, {"a": [[(0, 10)]]})
    with pytest.raises(TimelineMismatch, match="classes a, and the schedule of the classes a, b"):
        exposed_times(schedule, line)
