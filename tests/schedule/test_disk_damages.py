"""No unsafe damage to a plan with a disk is accepted, and no safe one refused, by brute force."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from tests.helpers.disk_plans import disk_plan, written_plan
from tests.helpers.schedule_oracle import problems
from tests.schedule.damages import DAMAGES
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Copy, Feed, Stream
from twinstream.schedule.proof.needed_waits import needed_waits
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.tensors import DEVICE, DISK


@pytest.fixture(scope="module", params=["read", "written"])
def plan(request: pytest.FixtureRequest) -> RankSchedule:
    """About 70 ops, ten of which are reads; or 120 ops, 20 of them reads, and 16 writes."""
    return disk_plan() if request.param == "read" else written_plan()


def with_op(plan: RankSchedule, op_id: str, **changes: object) -> RankSchedule:
    ops = [op.model_copy(update=changes) if op.op_id == op_id else op for op in plan.ops]
    return plan.model_copy(update={"ops": tuple(ops)})


def first_read(plan: RankSchedule) -> Copy:
    return next(op for op in plan.ops if isinstance(op, Copy) and op.source.startswith("disk."))


def test_damages_are_judged_like_the_oracle(plan: RankSchedule) -> None:
    judged = Counter[bool]()
    for name, damage in DAMAGES.items():
        damaged = damage(plan, Random(name))
        if damaged is not None:
            unsafe = bool(problems(damaged))
            assert bool(verify_rank(damaged)) == unsafe, name
            judged[unsafe] += 1
    assert judged[True] > 10


def test_every_wait_of_reads_and_writes_and_their_copies_is_needed(plan: RankSchedule) -> None:
    """Of the waits that nothing else implies, none may be dropped."""
    tiers = {slot.slot_id: slot.tier for slot in plan.slots}
    needed, dropped = needed_waits(plan), 0
    ring = {op.destination for op in plan.ops if isinstance(op, Copy) and tiers[op.source] == DISK}
    ring |= {op.source for op in plan.ops if isinstance(op, Copy) and tiers[op.destination] == DISK}
    for at, op in enumerate(plan.ops):
        if not isinstance(op, Copy) or not {op.source, op.destination} & ring:
            continue
        for field, waits in (
            ("waits", needed.same_pass[at]),
            ("waits_previous", needed.previous[at]),
        ):
            least = tuple(plan.ops[wait].op_id for wait in waits)
            for name in least:
                left = tuple(one for one in least if one != name)
                assert verify_rank(with_op(plan, op.op_id, **{field: left})), (op.op_id, name)
                dropped += 1
    assert dropped > 10


def test_slots_of_a_disk_that_overlap_are_refused(plan: RankSchedule) -> None:
    carried = {item.slot for item in plan.carried}
    on_disk = [slot for slot in plan.slots if slot.tier == DISK and slot.slot_id in carried]
    for one, other in pairwise(on_disk):
        moved = other.model_copy(update={"offset_bytes": one.offset_bytes})
        slots = tuple(moved if slot is other else slot for slot in plan.slots)
        found = verify_rank(plan.model_copy(update={"slots": slots}))
        assert "CarriedNotValid" in {type(one).__name__ for one in found}
    unaligned = on_disk[-1].model_copy(update={"offset_bytes": on_disk[-1].offset_bytes + 256})
    slots = tuple(unaligned if slot is on_disk[-1] else slot for slot in plan.slots)
    found = verify_rank(plan.model_copy(update={"slots": slots}))
    assert "SlotMisaligned" in {type(one).__name__ for one in found}


def test_slots_of_what_a_pass_leaves_on_a_disk_and_takes_from_there_overlap_nothing() -> None:
    """Gradients and activations, too, which no pass carries to the next: each written over."""
    plan = written_plan("900KiB", "1300KiB", tokens=320)
    carried = {item.slot for item in plan.carried}
    passing = [slot for slot in plan.slots if slot.tier == DISK and slot.slot_id not in carried]
    kept = next(slot for slot in plan.slots if slot.tier == DISK and slot.slot_id in carried)
    assert passing
    for one in passing:
        moved = one.model_copy(update={"offset_bytes": kept.offset_bytes})
        slots = tuple(moved if slot is one else slot for slot in plan.slots)
        assert verify_rank(plan.model_copy(update={"slots": slots})), one.slot_id


def test_a_disk_is_used_by_copies_from_and_to_host_memory_alone(plan: RankSchedule) -> None:
    read = first_read(plan)
    device = next(slot.slot_id for slot in plan.slots if slot.tier == DEVICE)
    feed = next(op for op in plan.ops if isinstance(op, Feed))
    for damaged, said in (
        (
            with_op(plan, read.op_id, source=read.destination, destination=read.source),
            "not on 'disk_write'",
        ),
        (with_op(plan, read.op_id, destination=device), "does not copy between that and host"),
        (with_op(plan, read.op_id, stream=Stream(queue="h2d")), "not on 'disk_read'"),
        (with_op(plan, feed.op_id, stream=read.stream), "does not use a disk"),
        (with_op(plan, feed.op_id, slot=read.source), "does not copy between that and host"),
    ):
        assert "DiskMisused" in problems(damaged)
        found = [one for one in verify_rank(damaged) if type(one).__name__ == "DiskMisused"]
        assert any(said in one.message for one in found), said


def test_without_a_cap_there_is_no_disk(plan: RankSchedule) -> None:
    caps = plan.caps.model_copy(update={"disk_bytes": None})
    found = verify_rank(plan.model_copy(update={"caps": caps}))
    assert [type(one).__name__ for one in found] == ["ArenaExceedsCap"]


def test_a_read_that_is_issued_before_the_write_of_what_it_reads_is_refused() -> None:
    """Gradients that go to the disk in one round and come back in the next."""
    plan = written_plan(tokens=320)
    position = {op.op_id: at for at, op in enumerate(plan.ops)}
    writes = {
        (op.tensor, op.version): op
        for op in plan.ops
        if isinstance(op, Copy) and op.stream.queue == "disk_write"
    }
    pairs = [
        (writes[op.tensor, op.version], op)
        for op in plan.ops
        if isinstance(op, Copy)
        and op.stream.queue == "disk_read"
        and (op.tensor, op.version) in writes
        and position[writes[op.tensor, op.version].op_id] < position[op.op_id]
    ]
    assert len(pairs) > 5
    for write, read in pairs:
        ops = [op for op in plan.ops if op is not read]
        ops.insert(position[write.op_id], read.model_copy(update={"waits": ()}))
        assert verify_rank(plan.model_copy(update={"ops": tuple(ops)})), read.op_id
