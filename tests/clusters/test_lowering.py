"""Layouts lowered: every class is safe, sides of exchanges agree, and there is one order of all."""

from collections import Counter

import pytest

from tests.clusters.random_jobs import DENSE, GPT, MIXTURE, job_of, lowered, random_job
from twinstream.clusters.assembling import in_one_order
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.proof.needed_waits import needed_waits


@pytest.mark.parametrize("seed", range(50))
def test_random_layouts_are_safe(seed):
    """Verified: every class, what meets (kind, tensor, version, bytes), the order, no deadlock."""
    schedule = lowered(random_job(seed))
    assert verify(schedule) == []
    for part in schedule.schedules.values():
        RankSchedule.model_validate(part.model_dump())  # made without being looked at
    Schedule.model_validate(schedule.model_dump())


@pytest.mark.parametrize(
    ("shape", "microbatches", "fields"),
    [
        (DENSE, 4, {"pp": 4, "tp": 2, "stage_layers": (3, 0, 5, 0)}),
        (DENSE, 4, {"pp": 2, "tp": 2, "sequence_parallel": False, "stage_layers": (0, 8)}),
        (
            DENSE,
            3,
            {"pp": 2, "stage_layers": (8, 0), "pipeline": "zero_bubble", "zero": 3, "dp": 2},
        ),
        (
            DENSE,
            4,
            {"pp": 2, "virtual_stages": 2, "pipeline": "ring", "stage_layers": (0, 4, 4, 0)},
        ),
        (DENSE, 2, {"dp": 6, "cp": 2, "shard": 4, "zero": 1}),
        (DENSE, 2, {"dp": 6, "shard": 3, "zero": 2, "dp_overlap": False}),
        (MIXTURE, 2, {"ep": 2, "dp": 4, "tp": 2, "zero": 3, "cp": 2}),
        (MIXTURE, 2, {"tp": 4, "sequence_parallel": False, "recompute": "full"}),
        (GPT, 4, {"pp": 2, "tp": 2, "cp": 4, "recompute": "full"}),
        (GPT, 4, {"pp": 3, "dp": 2, "zero": 3}),
        (GPT, 4, {"dp": 2, "zero": 3}),
    ],
)
def test_odd_layouts_are_safe(shape, microbatches, fields):
    assert verify(lowered(job_of(microbatches, shape, **fields))) == []


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_of_every_class_what_it_says_is_a_part_of_the_one_order(seed):
    schedule = lowered(random_job(seed))
    for one in schedule.classes:
        own = [op.op_id for op in schedule.of(one).ops if op.kind == "communicate"]
        told = [op_id for each in schedule.order for name, op_id in each.sides if name == one.name]
        assert told == own


@pytest.mark.parametrize("seed", range(1, 30, 4))
def test_issued_in_one_order_twice_it_stays_so(seed):
    schedule = lowered(random_job(seed))
    again = in_one_order(schedule)
    assert Counter(again.order) == Counter(schedule.order)
    for name, part in again.schedules.items():
        assert {op.op_id: op for op in part.ops} == {
            op.op_id: op for op in schedule.schedules[name].ops
        }
    assert verify(again) == []


@pytest.mark.parametrize("seed", range(2, 40, 4))
def test_no_wait_is_implied_by_the_others(seed):
    """An event is waited for only where nothing else makes sure of it: waits take time."""
    for part in lowered(random_job(seed)).schedules.values():
        needed = needed_waits(part)
        assert [set(waits) for waits in needed.order.waits] == [set(w) for w in needed.same_pass]


def test_a_deadlock_is_left_to_be_told():
    """Two stages that both first receive: the order has what can run, and the rest behind it."""
    schedule = lowered(job_of(2, pp=2))
    second = schedule.schedules["stage 1"]
    swapped = [op.model_copy(update={"waits": ()}) for op in second.ops]
    first = schedule.schedules["stage 0"]
    sent = next(op.op_id for op in first.ops if op.op_id.startswith("send."))
    back = next(op for op in first.ops if op.op_id.startswith("recv."))
    ops = [
        op.model_copy(update={"waits": (back.op_id,)}) if op.op_id == sent else op
        for op in sorted(first.ops, key=lambda op: op is not back)
    ]
    stuck = {
        "stage 0": first.model_copy(update={"ops": tuple(ops)}),
        "stage 1": second.model_copy(update={"ops": tuple(swapped)}),
    }
    found = in_one_order(schedule.model_copy(update={"schedules": stuck}))
    for name, part in stuck.items():
        assert Counter(op.op_id for op in found.schedules[name].ops) == Counter(
            op.op_id for op in part.ops
        )
    sides = [side for one in found.order for side in one.sides]
    assert len(sides) == len(set(sides)) == sum(len(one.sides) for one in schedule.order)


@pytest.mark.parametrize("fields", [{"tp": 2, "dp": 2}, {"dp": 4, "pp": 2}, {"dp": 4, "zero": 0}])
def test_without_overlap_no_gradient_is_reduced_before_all_are_complete(fields):
    for part in lowered(job_of(3, dp_overlap=False, **fields)).schedules.values():
        place = {op.op_id: at for at, op in enumerate(part.ops)}
        reduced = [op for op in part.ops if op.op_id.startswith("reduce.")]
        assert reduced and "gradients_complete" in reduced[0].waits
        computed = [at for name, at in place.items() if name.startswith(("backward", "weight"))]
        assert max(computed) < place["gradients_complete"]
