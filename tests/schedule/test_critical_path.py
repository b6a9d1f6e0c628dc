"""The critical path: without gaps, and each op on it released by the one before."""

from itertools import pairwise

from hypothesis import given

from tests.front_door.small_schedule import small_schedule, timeline
from tests.helpers.fixed_costs import FixedCosts
from tests.helpers.schedules import schedules
from twinstream.schedule.analysis.critical_path import critical_path
from twinstream.schedule.ops import Stream
from twinstream.schedule.timeline import Provenance
from twinstream.simulator.replay import replay

HERE = Provenance(kind="simulated", where="here")


def test_a_load_that_a_task_waits_for_is_on_the_path_of_the_step():
    schedule = small_schedule()
    ops = {op.op_id: op for op in schedule.ops}
    waiting = ops["first"].model_copy(update={"waits": ("h2d.w",)})
    schedule = schedule.model_copy(
        update={"ops": tuple(waiting if op.op_id == "first" else op for op in schedule.ops)}
    )
    # One after the other: h2d.w, first, h2d.x, again, d2h.x, last.
    found = critical_path(schedule, timeline(100, 50, 10, 40, 20, 80))
    assert [(piece.op_id, piece.start_ns, piece.end_ns) for piece in found] == [
        ("h2d.w", 0, 100), ("first", 100, 150), (None, 150, 160), ("again", 160, 200),
        (None, 200, 220), ("last", 220, 300),
    ]  # fmt: skip


@given(schedules())
def test_the_path_is_the_whole_step_and_every_op_is_released_by_the_one_before(pair):
    _, schedule = pair
    line = replay(schedule, FixedCosts(lambda op: 1 + len(op.op_id) % 5, wait_ns=2), HERE)
    found = critical_path(schedule, line)
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    mine = [i for i, op in enumerate(schedule.ops) if op.stream == Stream(queue="compute")]
    if not mine:
        return
    end = mine[-1]
    begin_ns = (
        line.passes[-2].end_ns[end] if len(line.passes) > 1 else min(line.passes[-1].start_ns)
    )
    assert sum(piece.end_ns - piece.start_ns for piece in found) == (
        line.passes[-1].end_ns[end] - begin_ns
    )
    for before, after in pairwise(found):
        assert before.end_ns == after.start_ns
    # With these costs an op starts when what releases it ends, or one wait later.
    assert all(piece.end_ns - piece.start_ns <= 2 for piece in found if piece.op_id is None)
    ops = [schedule.ops[position[piece.op_id]] for piece in found if piece.op_id is not None]
    for before, after in pairwise(ops):
        assert (
            before.stream == after.stream
            or before.op_id in after.waits
            or before.op_id in after.waits_previous
        )
