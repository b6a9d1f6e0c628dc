"""Gaps of the compute stream on hand-drawn timelines, and what they are put down to."""

from tests.helpers.sketches import Spans, feed, fetch, op, sketch, tensor, timeline
from twinstream.schedule.analysis.idle import idle_by_queue, idle_intervals
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute, Operand, Stream
from twinstream.schedule.tensors import DEVICE, Slot
from twinstream.schedule.timeline import Timeline


def intervals(schedule, line, *stream):
    """The gaps of one device."""
    return idle_intervals(Schedule.of_rank(schedule), Timeline.of_rank(line), *stream)


def gaps(ops, *passes: Spans, **fields):
    """(start, end, before, waited for, tensor) of every gap of compute."""
    return told(intervals(sketch(ops, **fields), timeline(ops, *passes)))


def told(found):
    for one in found:  # pieces make up the gap, the last first
        assert [one.end_ns, *(p.start_ns for p in one.pieces)] == [
            *(p.end_ns for p in one.pieces), one.start_ns,
        ]  # fmt: skip
    return [(g.start_ns, g.end_ns, g.before, g.waited_for, g.tensor) for g in found]


def test_a_gap_is_put_down_to_the_last_of_the_waits_to_end():
    ops = [
        op("early", "d2h"),
        op("a", "compute"),
        op("load", "h2d"),
        op("b", "compute", ("early", "load")),
    ]
    found = gaps(ops, [(0, 3), (0, 10), (5, 25), (26, 30)])
    assert found == [(10, 26, "b", "load", "x")]


def test_a_gap_after_waits_that_were_over_is_latency():
    ops = [op("load", "h2d"), op("a", "compute"), op("b", "compute", ("load",))]
    found = gaps(ops, [(0, 10), (0, 10), (13, 20)])
    assert found == [(10, 13, "b", None, None)]


def test_the_gap_between_passes_counts_once_there_are_two():
    ops = [op("a", "compute", (), ("store",)), op("store", "d2h", ("a",))]
    first, second = [(0, 10), (10, 50)], [(51, 61), (61, 101)]
    assert gaps(ops, first) == []
    assert gaps(ops, first, second) == [(10, 51, "a", "store", "x")]


def test_waits_into_the_pass_before_and_within_the_pass_compete():
    ops = [op("load", "h2d"), op("a", "compute", ("load",), ("store",)), op("store", "d2h", ("a",))]
    first = [(0, 5), (5, 10), (10, 50)]
    assert gaps(ops, first, [(5, 60), (60, 65), (65, 99)])[0][3] == "load"
    assert gaps(ops, first, [(5, 40), (50, 55), (55, 99)])[0][3] == "store"


def test_of_a_task_the_tensor_is_the_first_that_it_makes():
    size = 256
    names = ["weights", "input", "output", "more"]
    tensors = tuple(tensor(name, size) for name in names)
    slots = tuple(
        Slot(slot_id=n, tier=DEVICE, offset_bytes=size * i, size_bytes=size)
        for i, n in enumerate(names)
    )
    other = op("other", "compute2")
    assert isinstance(other, Compute)
    modes = ("read", "read", "update", "write")
    operands = tuple(
        Operand(name=n, tensor=n, version=1, mode=mode, slot=n)
        for n, mode in zip(names, modes, strict=True)
    )
    other = other.model_copy(update={"operands": operands})
    ops = [other, op("a", "compute"), op("b", "compute", ("other",))]
    spans = [(0, 9), (0, 1), (9, 10)]
    found = gaps(ops, spans, tensors=(tensor("x", size), *tensors), slots=slots)
    assert found == [(1, 9, "b", "other", "output")]
    only_reads = other.model_copy(update={"operands": operands[:2]})
    assert gaps([only_reads, *ops[1:]], spans, tensors=tensors, slots=slots)[0][4] == "weights"
    nothing = other.model_copy(update={"operands": ()})
    assert gaps([nothing, *ops[1:]], spans) == [(1, 9, "b", "other", None)]


def test_the_host_is_a_resource_too():
    ops = [feed("fill"), op("a", "compute"), op("b", "compute", ("fill",)), fetch("take", ("b",))]
    found = gaps(ops, [(0, 30), (0, 1), (30, 31), (31, 40)])
    assert found == [(1, 30, "b", "fill", "x")]


def test_any_stream_can_be_asked_for():
    ops = [op("a", "compute"), op("load", "h2d"), op("next", "h2d", ("a",))]
    found = intervals(sketch(ops), timeline(ops, [(0, 50), (0, 10), (50, 60)]), Stream(queue="h2d"))
    assert told(found) == [(10, 50, "next", "a", None)]
    assert intervals(sketch(ops), timeline(ops, [(0, 5)] * 3), Stream(queue="d2h")) == []


def test_a_gap_is_followed_back_to_what_its_op_itself_waited_for():
    ops = [
        op("a", "compute"),
        op("store", "d2h"),
        op("load", "h2d", ("store",)),
        op("b", "compute", ("load",)),
        op("c", "compute", ("load",)),
    ]
    line = timeline(ops, [(0, 5), (0, 12), (14, 20), (21, 30), (33, 35)])
    found = intervals(sketch(ops), line)
    assert told(found) == [(5, 21, "b", "load", "x"), (30, 33, "c", None, None)]
    assert idle_by_queue(found) == {"latency": 1 + 2 + 3, "h2d": 6, "d2h": 12 - 5}
    assert [piece.cause for piece in found[0].pieces] == ["latency", "copy", "latency", "copy"]
