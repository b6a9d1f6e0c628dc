"""Times by kind against their floors, by hand; timelines in few bytes."""

import pytest

from benchmarks.gpu.cells.compact import compact_timelines
from benchmarks.gpu.cells.floors import kind_times, work_floor_ns
from tests.front_door.small_schedule import FORWARD_FLOPS, NORM_FLOPS, small_schedule, timeline
from tests.helpers.flat_machine import flat_machine
from twinstream.schedule.cost import Work

PREDICTED = timeline(100, 40, 60, 40, 50, 40)
MEASURED = timeline(200, 50, 50, 60, 80, 70, kind="measured")


def test_each_kind_has_its_times_and_its_floor():
    kinds = {
        kind.name: kind
        for kind in kind_times(small_schedule(), flat_machine(), PREDICTED, MEASURED)
    }
    assert list(kinds) == ["copy h2d", "block_forward", "copy d2h", "block_recompute INPUT"]
    copies = kinds["copy h2d"]
    assert (copies.num_ops, copies.predicted_ns, copies.measured_ns) == (2, 160, 250)
    assert copies.floor_ns == pytest.approx((1024 + 512) / 50)
    assert kinds["copy d2h"].floor_ns == pytest.approx(512 / 40)
    # norms move no bytes here, and their FLOPs are no matrix product's
    assert kinds["block_forward"].floor_ns == pytest.approx(2 * FORWARD_FLOPS / 1e5)
    assert kinds["block_recompute INPUT"].measured_ns == 60
    assert NORM_FLOPS > 0


@pytest.mark.parametrize(
    ("unit", "flops", "hbm_bytes", "floor_ns"),
    [("matmul", 10**6, 1000, 10.0), ("matmul", 10**5, 9000, 9.0), ("swiglu", 10**9, 5000, 5.0)],
)
def test_a_floor_is_the_longer_of_arithmetic_and_traffic(unit, flops, hbm_bytes, floor_ns):
    work = Work(unit=unit, shape=(1,), flops=flops, hbm_bytes=hbm_bytes, launches=1)
    assert work_floor_ns(work, flat_machine()) == pytest.approx(floor_ns)


def test_a_compact_timeline_keeps_every_op_in_microseconds():
    predicted, measured = (
        timeline(*(1000 * ns for ns in lasting))
        for lasting in ((1, 2, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1))
    )
    compact = compact_timelines(small_schedule(), predicted, measured)
    assert compact["kinds"] == ["copy h2d", "block_forward", "block_recompute INPUT", "copy d2h"]
    assert compact["kind"] == [0, 1, 0, 2, 3, 1]
    assert compact["streams"] == ["0:h2d", "0:compute", "0:d2h"]
    assert compact["stream"] == [0, 1, 0, 1, 2, 1]
    assert compact["predicted"] == {
        "starts_us": [0, 1, 3, 6, 10, 15], "durations_us": [1, 2, 3, 4, 5, 6],
    }  # fmt: skip
    assert compact["measured"]["durations_us"] == [6, 5, 4, 3, 2, 1]
