"""The waits that are left order the same ops as all of them, and none of them is implied."""

from hypothesis import given, settings

from tests.helpers.bodies import random_bodies
from tests.helpers.schedule_oracle import happens_before, waits_of
from tests.helpers.sketches import op, sketch
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.proof.needed_waits import NeededWaits, needed_waits


def with_waits(schedule: RankSchedule, needed: NeededWaits) -> RankSchedule:
    ids = [op.op_id for op in schedule.ops]
    ops = [
        op.model_copy(
            update={
                "waits": tuple(ids[w] for w in needed.same_pass[i]),
                "waits_previous": tuple(ids[w] for w in needed.previous[i]),
            }
        )
        for i, op in enumerate(schedule.ops)
    ]
    return schedule.model_copy(update={"ops": tuple(ops)})


def order(schedule: RankSchedule, num_passes: int) -> list[set[int]]:
    return happens_before(schedule, waits_of(schedule), num_passes)


@given(random_bodies())
@settings(max_examples=200)
def test_the_waits_left_order_the_same_ops(schedule):
    fewer = with_waits(schedule, needed_waits(schedule))
    assert order(fewer, 3) == order(schedule, 3)


@given(random_bodies())
@settings(max_examples=100)
def test_no_wait_that_is_left_is_implied_by_the_others(schedule):
    fewer = with_waits(schedule, needed_waits(schedule))
    whole = order(fewer, 3)
    for at, found in enumerate(fewer.ops):
        for field in ("waits", "waits_previous"):
            for wait in getattr(found, field):
                rest = tuple(w for w in getattr(found, field) if w != wait)
                ops = list(fewer.ops)
                ops[at] = found.model_copy(update={field: rest})
                assert order(fewer.model_copy(update={"ops": tuple(ops)}), 3) != whole


def test_a_wait_that_two_others_imply_together_is_dropped():
    schedule = sketch(
        [
            op("load", "h2d"),
            op("use", "compute", ("load",)),
            op("store", "d2h", ("use", "load"), ("store", "load")),
        ]
    )
    needed = needed_waits(schedule)
    assert needed.same_pass == ((), (0,), (1,))
    assert needed.previous == ((), (), ())
