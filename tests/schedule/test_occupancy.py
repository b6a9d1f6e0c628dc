"""Live bytes over time on hand-drawn schedules."""

from typing import Any

import pytest

from tests.helpers.sketches import op, sketch, tensor
from twinstream.schedule.analysis.occupancy import memory_over_time
from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.ops import Compute, Copy, Mode, Op, Operand, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Role, Slot, Tensor
from twinstream.schedule.timeline import PassSpans


def device(name: str, offset: int, size: int) -> Slot:
    return Slot(slot_id=name, tier=DEVICE, offset_bytes=offset, size_bytes=size)


def laid(*tensors: Tensor) -> dict[str, Any]:
    """Fields of a sketch with these tensors in device slots of their names."""
    slots = tuple(device(t.tensor_id, 512 * i, t.size_bytes) for i, t in enumerate(tensors))
    return {"tensors": tensors, "slots": slots}


def task(name: str, *uses: tuple[str, Mode, str]) -> Op:
    """A compute op that uses (tensor, mode, slot)."""
    found = op(name, "compute")
    assert isinstance(found, Compute)
    operands = tuple(
        Operand(name=str(i), tensor=t, version=int(mode != "scratch"), mode=mode, slot=slot)
        for i, (t, mode, slot) in enumerate(uses)
    )
    return found.model_copy(update={"operands": operands})


def copy(name: str, queue: str, tensor: str, source: str, destination: str) -> Copy:
    return Copy(
        op_id=name, stream=Stream(queue=queue), tensor=tensor, version=1, source=source,
        destination=destination,
    )  # fmt: skip


def samples(ops, spans, tier=DEVICE, **fields) -> list[tuple[int, dict[Role, int]]]:
    starts, ends = (tuple(times) for times in zip(*spans, strict=True))
    schedule = sketch(ops, **fields)
    found = memory_over_time(schedule, PassSpans(start_ns=starts, end_ns=ends), tier)
    return [(sample.start_ns, sample.bytes_by_role) for sample in found]


def test_content_lives_from_the_start_of_its_maker_to_the_end_of_its_last_reader():
    ops = [
        task("make", ("y", "write", "y")),
        task("idle"),
        task("use", ("y", "read", "y"), ("z", "write", "z")),
        task("end", ("z", "read", "z")),
    ]
    found = samples(
        ops,
        [(0, 10), (10, 20), (20, 35), (40, 50)],
        **laid(tensor("y", 300), tensor("z", 100, "gradient")),
    )
    assert found == [
        (0, {"activation": 300}),
        (20, {"activation": 300, "gradient": 100}),
        (35, {"gradient": 100}),
        (50, {}),
    ]


def test_bytes_written_again_start_a_new_life_and_dead_time_in_between_does_not_count():
    ops = [
        task("first", ("y", "write", "y")),
        task("between"),
        task("second", ("z", "write", "z")),
    ]
    found = samples(
        ops,
        [(0, 10), (10, 20), (20, 30)],
        tensors=(tensor("y", 300), tensor("z", 100, "gradient")),
        slots=(device("y", 0, 300), device("z", 256, 100)),
    )
    assert found == [(0, {"activation": 300}), (10, {}), (20, {"gradient": 100}), (30, {})]


def test_an_update_goes_on_with_the_same_content():
    ops = [task("make", ("y", "write", "y")), task("idle"), task("add", ("y", "update", "y"))]
    found = samples(
        ops,
        [(0, 10), (10, 20), (20, 30)],
        **laid(tensor("y", 300)),
    )
    assert found == [(0, {"activation": 300}), (30, {})]


def test_scratch_lives_only_while_its_task_runs():
    found = samples(
        [task("a", ("s", "scratch", "s")), task("b"), task("c", ("s", "scratch", "s"))],
        [(5, 10), (10, 20), (20, 30)],
        **laid(tensor("s", 64, "scratch")),
    )
    assert found == [(5, {"scratch": 64}), (10, {}), (20, {"scratch": 64}), (30, {})]


def test_what_is_carried_lives_through_the_boundary_on_both_sides():
    ops = [task("use", ("w", "read", "w")), task("step", ("w", "update", "w")), task("last")]
    fields = laid(tensor("w", 128, "parameter")) | {"carried": (Carried(tensor="w", slot="w"),)}
    found = samples(ops, [(100, 110), (120, 130), (130, 190)], **fields)
    assert found == [(100, {"parameter": 128}), (190, {})]


def test_a_carried_home_is_alive_until_its_last_reader_and_again_once_written_back():
    ops = [
        copy("load", "h2d", "w", "home", "w"),
        task("step", ("w", "update", "w")),
        copy("store", "d2h", "w", "w", "home"),
    ]
    fields = {
        "tensors": (tensor("w", 128, "parameter"),),
        "slots": (
            device("w", 0, 128),
            Slot(slot_id="home", tier=HOST, offset_bytes=0, size_bytes=128),
        ),
        "carried": (Carried(tensor="w", slot="home"),),
    }
    spans = [(0, 10), (10, 20), (20, 30)]
    host = samples(ops, spans, HOST, **fields)
    assert host == [(0, {"parameter": 128}), (10, {}), (20, {"parameter": 128}), (30, {})]
    assert samples(ops, spans, DEVICE, **fields) == [(0, {"parameter": 128}), (30, {})]


def test_parts_live_one_by_one_and_padding_between_them_is_nobodys():
    fields = {
        "tensors": (
            tensor("y", 700, "context"),
            tensor("y.0", 200, "context", "y", 0),
            tensor("y.1", 300, "context", "y", 256),
        ),
        "slots": (device("y", 0, 700),),
    }
    ops = [
        task("make", ("y.0", "write", "y")),
        task("more", ("y.1", "write", "y")),
        task("use", ("y.0", "read", "y")),
        task("whole", ("y", "read", "y")),
    ]
    found = samples(ops, [(0, 10), (10, 20), (20, 30), (30, 40)], **fields)
    assert found == [(0, {"context": 200}), (10, {"context": 500}), (40, {})]
    at_once = samples([task("make", ("y", "write", "y"))], [(0, 10)], **fields)
    assert at_once == [(0, {"context": 500}), (10, {})]


def test_a_tier_without_slots_has_no_samples_and_a_sample_knows_its_total():
    ops = [task("a", ("y", "write", "y"), ("z", "write", "z"))]
    fields = laid(tensor("y", 300), tensor("z", 100, "gradient"))
    assert samples(ops, [(0, 1)], HOST, **fields) == []
    spans = PassSpans(start_ns=(0,), end_ns=(1,))
    assert memory_over_time(sketch(ops, **fields), spans, DEVICE)[0].total_bytes == 400


def test_a_tier_that_is_only_its_name_is_refused():
    spans = PassSpans(start_ns=(0,), end_ns=(1,))
    with pytest.raises(ArgumentError, match="tier needs Tier, got str 'device'"):
        memory_over_time(sketch([op("a", "compute")]), spans, "device")
