"""Derived waits: enough for `verify`, and not one too many."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings

from tests.helpers.plans import MACHINE, planned, tiny_plans
from tests.helpers.schedule_oracle import Arena, conflicts, happens_before, waits_of
from tests.helpers.schedules import schedules
from tests.helpers.tiny_chains import tiny_chain
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Copy, Stream
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.tensors import DEVICE, Slot, Tensor

CASES = [("packed", "tiny"), ("sliced", "tiny-qwen3"), ("one chunk", "tiny-qwen3")]


def with_waits(schedule: RankSchedule) -> RankSchedule:
    ops = derive_waits(schedule.ops, schedule.tensors, schedule.slots)
    return schedule.model_copy(update={"ops": ops})


def without_each_wait(schedule: RankSchedule) -> Iterator[tuple[str, RankSchedule]]:
    """(the wait that is gone, the schedule without it)."""
    for position, op in enumerate(schedule.ops):
        for field in ("waits", "waits_previous"):
            waits: tuple[str, ...] = getattr(op, field)
            for wait in waits:
                fewer = op.model_copy(update={field: tuple(w for w in waits if w != wait)})
                ops = (*schedule.ops[:position], fewer, *schedule.ops[position + 1 :])
                yield f"{op.op_id} {field} {wait}", schedule.model_copy(update={"ops": ops})


@given(schedules())
@settings(max_examples=150)
def test_waits_of_random_schedules_are_enough_and_each_is_needed(pair):
    schedule = with_waits(pair[1])
    assert verify_rank(schedule) == []
    for what, damaged in without_each_wait(schedule):
        assert verify_rank(damaged), f"{what} is not needed"


@given(schedules())
def test_deriving_waits_changes_nothing_else_and_forgets_the_old_ones(pair):
    schedule = pair[1]
    nothing = {"waits": (), "waits_previous": ()}
    bare = tuple(op.model_copy(update=nothing) for op in schedule.ops)
    derived = derive_waits(schedule.ops, schedule.tensors, schedule.slots)
    assert tuple(op.model_copy(update=nothing) for op in derived) == bare
    assert derived == derive_waits(bare, schedule.tensors, schedule.slots)


def copies_anywhere(seed: int) -> RankSchedule:
    """Copies between slots that overlap at will, whatever there is to read in them."""
    rng = Random(seed)
    places = [(rng.randrange(12), rng.choice([2, 4, 8])) for _ in range(5)]
    slots = tuple(
        Slot(slot_id=f"s{i}", tier=DEVICE, offset_bytes=offset, size_bytes=size)
        for i, (offset, size) in enumerate(places)
    )
    tensors = tuple(
        Tensor(tensor_id=f"t{size}", size_bytes=size, role="activation", dtype="u8", shape=(size,))
        for size in (2, 4, 8)
    )
    copies = []
    for number in range(rng.randint(3, 7)):
        source, destination = sorted(rng.sample(slots, 2), key=lambda slot: -slot.size_bytes)
        copies.append(
            Copy(
                op_id=f"o{number}", stream=Stream(queue=rng.choice("xyz")), version=0,
                tensor=f"t{destination.size_bytes}", source=source.slot_id,
                destination=destination.slot_id,
            )
        )  # fmt: skip
    return RankSchedule.model_construct(ops=tuple(copies), slots=slots, tensors=tensors, carried=())


def test_every_conflict_is_in_order_also_where_reads_meet_bytes_written_in_part():
    for seed in range(1000):
        schedule = with_waits(copies_anywhere(seed))
        _, pairs = conflicts(Arena(schedule, every_byte=True), num_passes=3)
        done = happens_before(schedule, waits_of(schedule), num_passes=3)
        assert [pair for pair in pairs if pair[0] not in done[pair[1]]] == [], seed


@pytest.mark.parametrize("policy", ["resident", "streaming", "optimal"])
@pytest.mark.parametrize(("workload", "preset"), CASES)
def test_every_plan_at_every_cap_has_no_wait_to_spare(workload, preset, policy):
    rng = Random(workload)
    plans = tiny_plans(workload, preset, policy)
    for _, schedule in plans:
        assert verify_rank(schedule) == []
        damaged = list(without_each_wait(schedule))
        for what, found in rng.sample(damaged, min(len(damaged), 20)):
            assert verify_rank(found), f"{what} is not needed"
    assert len(plans) > 1


@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_not_one_of_the_waits_of_a_plan_can_go(policy):
    schedule = planned(tiny_chain("sliced in pairs"), MACHINE, Caps(), policy)
    damaged = list(without_each_wait(schedule))
    assert len(damaged) > 10
    for what, found in damaged:
        assert verify_rank(found), f"{what} is not needed"
