"""Each rule of `verify`, broken once on purpose in a small schedule."""

import pytest

from tests.helpers.sketches import tensor
from tests.schedule.small import (
    CALL,
    COMPUTE,
    SCHEDULE,
    TENSORS,
    with_op,
    with_operand,
    with_slot,
    with_tensor,
    without,
)
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Stream
from twinstream.schedule.proof.verify import require_safe_rank, verify_rank
from twinstream.schedule.proof.violations import (
    ArenaExceedsCap,
    BadPart,
    BadWait,
    CarriedNotValid,
    OperandInWrongMemory,
    OperandsOverlap,
    OverwriteTooEarly,
    ReadTooEarly,
    SlotMisaligned,
    StreamMixed,
    TensorOutsideSlot,
    UnknownTier,
    UnsafeSchedule,
    VersionOutOfOrder,
    Violation,
    WrongContent,
)
from twinstream.schedule.tensors import Carried, Tier


def carrying(*pairs: tuple[str, str]) -> RankSchedule:
    carried = tuple(Carried(tensor=name, slot=slot) for name, slot in pairs)
    return SCHEDULE.model_copy(update={"carried": carried})


CASES: dict[str, tuple[RankSchedule, Violation]] = {
    "a wait for a later op": (
        with_op("op-step", waits=("feed", "load", "fetch")),
        BadWait(
            "op 'op-step' waits for 'fetch', which is not issued before it, and neither ever "
            "starts: 'op-step' waits for 'fetch', 'fetch' waits for 'op-head', 'op-head' follows "
            "'op-step' on 0:compute",
            ("op-step", "fetch"),
        ),
    ),
    "a wait for itself": (
        with_op("load", waits=("load",)),
        BadWait(
            "op 'load' waits for 'load', which is not issued before it, and neither ever starts: "
            "'load' waits for 'load'",
            ("load", "load"),
        ),
    ),
    "a wait for a later op that waits for nothing": (
        with_op("feed", waits=("load",)),
        BadWait("op 'feed' waits for 'load', which is not issued before it", ("feed", "load")),
    ),
    "a wait on the same stream": (
        with_op("op-head", waits=("op-step",)),
        BadWait(
            "op 'op-head' waits for 'op-step', which is on the same stream", ("op-head", "op-step")
        ),
    ),
    "a wait for nobody": (
        with_op("load", waits=("nobody",)),
        BadWait("op 'load' waits for 'nobody', which is not in the schedule", ("load", "nobody")),
    ),
    "a wait for nobody of the pass before": (
        with_op("load", waits_previous=("store", "nobody")),
        BadWait(
            "op 'load' waits for 'nobody' of the pass before, which is not in the schedule",
            ("load", "nobody"),
        ),
    ),
    "parts that overlap": (
        with_tensor("hidden.1", offset_bytes=255),
        BadPart(
            "part 'hidden.1' takes bytes 255 to 455 of 'hidden', which has 512 bytes, the first "
            "256 of them taken by parts before it",
            tensor="hidden.1",
        ),
    ),
    "a part outside its parent": (
        with_tensor("hidden.1", offset_bytes=313),
        BadPart(
            "part 'hidden.1' takes bytes 313 to 513 of 'hidden', which has 512 bytes, the first "
            "256 of them taken by parts before it",
            tensor="hidden.1",
        ),
    ),
    "a part of a part": (
        SCHEDULE.model_copy(update={"tensors": (*TENSORS, tensor("inner", 8, parent="hidden.0"))}),
        BadPart("'hidden.0' is a part of 'hidden' and has parts itself", tensor="hidden.0"),
    ),
    "an offset into nothing": (
        SCHEDULE.model_copy(update={"tensors": (*TENSORS, tensor("odd", 8, offset=4))}),
        BadPart("'odd' lies 4 bytes into a parent, but names none", tensor="odd"),
    ),
    "a slot off its alignment": (
        with_slot("host.other", offset_bytes=192),
        SlotMisaligned(
            "slot 'host.other' starts at byte 192 of host:0, not a multiple of 256",
            slot="host.other",
        ),
    ),
    "a slot on a second device": (
        with_slot("device.loss", tier=Tier(kind="device", index=1)),
        UnknownTier("device:1 holds slots, which only device:0, host:0, disk:0 can yet"),
    ),
    "a feed on a stream of the device": (
        with_op("feed", stream=COMPUTE),
        StreamMixed(
            "stream 0:compute has op 'feed' of the host and op 'op-head' of a device",
            ("feed", "op-head"),
        ),
    ),
    "an arena over its cap": (
        SCHEDULE.model_copy(update={"caps": Caps(device_bytes=1283)}),
        ArenaExceedsCap("the arena of device:0 takes 1284 bytes, 1 more than its cap of 1283"),
    ),
    "a tensor larger than its slot": (
        with_slot("device.loss", size_bytes=3),
        TensorOutsideSlot(
            "in op 'op-head' 'loss' takes bytes 0 to 4 of its root, slot 'device.loss' holds bytes "
            "0 to 3",
            ("op-head",),
            "loss",
            "device.loss",
        ),
    ),
    "an operand of the device's in host memory": (
        with_operand("op-step", 1, slot="host.weight"),
        OperandInWrongMemory(
            "op 'op-step' runs on the device, but its operand 'weight' is in slot 'host.weight' of "
            "host:0",
            ("op-step",),
            "weight",
            "host.weight",
        ),
    ),
    "an operand of the host's in device memory": (
        SCHEDULE.model_copy(
            update={"calls": {"call": CALL.model_copy(update={"processor": "host"})}}
        ),
        OperandInWrongMemory(
            "op 'op-step' runs on the host, but its operand 'weight' is in slot 'device.weight' of "
            "device:0",
            ("op-step",),
            "weight",
            "device.weight",
        ),
    ),
    "a slot that starts behind the tensor": (
        with_slot("device.loss", origin_bytes=1),
        TensorOutsideSlot(
            "in op 'op-head' 'loss' takes bytes 0 to 4 of its root, slot 'device.loss' holds bytes "
            "1 to 5",
            ("op-head",),
            "loss",
            "device.loss",
        ),
    ),
    "more parts than there are": (
        with_operand("op-head", 0, num_parts=3),
        TensorOutsideSlot(
            "in op 'op-head' 'hidden' has 2 parts, 3 are named",
            ("op-head",),
            "hidden",
            "device.hidden",
        ),
    ),
    "a carried tensor larger than its slot": (
        carrying(("weight", "host.weight"), ("weight", "device.loss")),
        TensorOutsideSlot(
            "among what is carried 'weight' takes bytes 0 to 512 of its root, slot 'device.loss' "
            "holds bytes 0 to 4",
            (),
            "weight",
            "device.loss",
        ),
    ),
    "an operand over another": (
        with_slot("device.hidden", offset_bytes=256, size_bytes=768),
        OperandsOverlap(
            "op 'op-step' writes slot 'device.hidden' (256 to 512 of device:0) as 'hidden' and "
            "writes it as another",
            ("op-step", "op-step"),
            "hidden",
            "device.hidden",
        ),
    ),
    "a result over what is read": (
        with_operand("op-head", 1, slot="device.hidden"),
        OperandsOverlap(
            "op 'op-head' writes slot 'device.hidden' (512 to 516 of device:0) as 'loss' and reads "
            "it as another",
            ("op-head", "op-head"),
            "loss",
            "device.hidden",
        ),
    ),
    "a version made again that is not the newest": (
        with_operand("op-remake", 0, version=0),
        VersionOutOfOrder(
            "op 'op-remake' makes version 0 of 'hidden.0' in slot 'device.hidden', but the newest "
            "version is 1",
            ("op-remake",),
            "hidden",
            "device.hidden",
        ),
    ),
    "content that is missing": (
        without("load"),
        WrongContent(
            "op 'op-step' needs version 0 of 'weight' in slot 'device.weight', but nothing valid "
            "is there",
            ("op-step",),
            "weight",
            "device.weight",
        ),
    ),
    "another version": (
        with_operand("op-head", 0, version=2),
        WrongContent(
            "op 'op-head' needs version 2 of 'hidden.0' in slot 'device.hidden', but it holds "
            "version 1 of 'hidden.0'",
            ("op-head",),
            "hidden",
            "device.hidden",
        ),
    ),
    "content copied in after it is read": (
        with_op("op-step", waits=("feed",)),
        ReadTooEarly(
            "op 'op-step' reads version 0 of 'weight' in slot 'device.weight' without waiting for "
            "op 'load', which makes it",
            ("op-step", "load"),
            "weight",
            "device.weight",
        ),
    ),
    "content of the pass before read too early": (
        with_op("load", waits_previous=("op-head",)),
        ReadTooEarly(
            "op 'load' reads version 0 of 'weight' in slot 'host.weight' without waiting for op "
            "'store' of the pass before, which makes it",
            ("load", "store"),
            "weight",
            "host.weight",
        ),
    ),
    "a result overwritten before it is fetched": (
        with_op("op-head", waits_previous=()),
        OverwriteTooEarly(
            "op 'op-head' writes 'loss' over slot 'device.loss' (1280 to 1284 of device:0) without "
            "waiting for op 'fetch' of the pass before, which reads there",
            ("op-head", "fetch"),
            "loss",
            "device.loss",
        ),
    ),
    "an input overwritten while it is read": (
        with_op("feed", waits_previous=()),
        OverwriteTooEarly(
            "op 'feed' writes 'tokens' over slot 'device.tokens' (1024 to 1088 of device:0) "
            "without waiting for op 'op-step' of the pass before, which reads there",
            ("feed", "op-step"),
            "tokens",
            "device.tokens",
        ),
    ),
    "no write-back": (
        without("store"),
        CarriedNotValid(
            "slot 'host.weight' does not hold the final version 1 of 'weight' when the pass ends, "
            "though it is carried",
            (),
            "weight",
            "host.weight",
        ),
    ),
    "carried tensors over one another": (
        carrying(("weight", "host.weight"), ("loss", "host.other")),
        CarriedNotValid(
            "carried tensors 'weight' in slot 'host.weight' and 'loss' in slot 'host.other' share "
            "bytes 256 to 260 of host:0",
            (),
            "loss",
            "host.other",
        ),
    ),
}


def test_the_small_schedule_is_safe() -> None:
    assert verify_rank(SCHEDULE) == []
    require_safe_rank(SCHEDULE)


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_named_with_op_tensor_and_slot(name: str) -> None:
    schedule, expected = CASES[name]
    found = verify_rank(schedule)
    assert expected in found, "\n".join(map(str, found))
    assert len(set(found)) == len(found)
    assert str(expected) == f"{type(expected).__name__}: {expected.message}"


def test_queues_of_two_devices_are_two_streams() -> None:
    other = Stream(device=1, queue="compute")
    ops = {op.op_id: op for op in SCHEDULE.ops}
    ops["op-head"] = ops["op-head"].model_copy(
        update={"stream": other, "waits": ("op-remake",), "waits_previous": ("fetch",)}
    )
    step = ops["op-step"]
    ops["op-step"] = step.model_copy(update={"waits_previous": ("op-head",)})
    assert verify_rank(SCHEDULE.model_copy(update={"ops": tuple(ops.values())})) == []
    ops["op-step"] = step
    found = verify_rank(SCHEDULE.model_copy(update={"ops": tuple(ops.values())}))
    assert {type(v) for v in found} == {OverwriteTooEarly}
    assert {v.ops for v in found} == {("op-step", "op-head")}


def test_an_unsafe_schedule_raises_with_its_first_violations() -> None:
    unsafe = SCHEDULE.model_copy(
        update={"ops": tuple(op.model_copy(update={"waits": ("a", "b")}) for op in SCHEDULE.ops)}
    )
    with pytest.raises(UnsafeSchedule) as caught:
        require_safe_rank(unsafe)
    assert len(caught.value.violations) == 2 * len(SCHEDULE.ops)
    message = str(caught.value)
    assert message.startswith("the schedule breaks 14 rule(s) and will not be run:\n  BadWait: ")
    assert message.count("BadWait") == 5
    assert "(and 9 more)" in message
