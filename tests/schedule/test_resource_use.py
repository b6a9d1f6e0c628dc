"""What ops draw of links and memories over time."""

import numpy as np
import pytest

from tests.front_door.small_schedule import small_schedule, timeline
from twinstream.schedule.analysis.resource_use import RESOURCES, bytes_by_op, use_over_time
from twinstream.schedule.tensors import DEVICE

# Ops of the small schedule, one after the other: h2d.w, first, h2d.x, again, d2h.x, last.
LASTING_NS = (100, 50, 10, 40, 20, 80)


def test_a_copy_moves_its_bytes_over_its_direction_hbm_and_host_dram():
    moved = {name: list(amounts) for name, amounts in bytes_by_op(small_schedule()).items()}
    assert moved["h2d"] == [1024, 0, 512, 0, 0, 0]
    assert moved["d2h"] == [0, 0, 0, 0, 512, 0]
    assert moved["hbm"] == moved["host_dram"] == [1024, 0, 512, 0, 512, 0]


def test_a_part_moves_its_own_bytes_wherever_it_lies_in_its_parent():
    whole, part = small_schedule().tensors
    inside = part.model_copy(update={"parent": "w", "offset_bytes": 512})
    schedule = small_schedule().model_copy(update={"tensors": (whole, inside)})
    moved = {name: list(amounts) for name, amounts in bytes_by_op(schedule).items()}
    assert moved["h2d"] == [1024, 0, 512, 0, 0, 0]
    assert moved["d2h"] == [0, 0, 0, 0, 512, 0]
    assert moved["hbm"] == moved["host_dram"] == [1024, 0, 512, 0, 512, 0]
    on_device = tuple(s.model_copy(update={"tier": DEVICE}) for s in schedule.slots)
    found = bytes_by_op(schedule.model_copy(update={"slots": on_device}))
    assert list(found["hbm"]) == [2048, 0, 1024, 0, 1024, 0]


def test_a_copy_inside_the_device_reads_and_writes_hbm_and_nothing_else():
    schedule = small_schedule()
    inside = schedule.model_copy(
        update={"slots": tuple(s.model_copy(update={"tier": DEVICE}) for s in schedule.slots)}
    )
    moved = {name: list(amounts) for name, amounts in bytes_by_op(inside).items()}
    assert moved["hbm"] == [2048, 0, 1024, 0, 1024, 0]
    assert not any(moved["h2d"] + moved["d2h"] + moved["host_dram"])


def test_bytes_are_spread_evenly_from_start_to_end():
    found = use_over_time(small_schedule(), timeline(*LASTING_NS), [0, 50, 100, 155, 160, 300])
    # h2d.w: 1024 bytes in ns 0 to 100; h2d.x: 512 bytes in ns 150 to 160.
    assert found["h2d"] == pytest.approx([10.24, 10.24, 256 / 55, 256 / 5, 0])
    assert found["d2h"][-1] == pytest.approx(512 / 140)


def test_nothing_is_lost_between_the_edges():
    edges = np.linspace(0, sum(LASTING_NS), 38)
    found = use_over_time(small_schedule(), timeline(*LASTING_NS), edges)
    total = bytes_by_op(small_schedule())
    for name in RESOURCES:
        assert (found[name] * np.diff(edges)).sum() == pytest.approx(total[name].sum())


def test_an_op_that_takes_no_time_adds_nothing():
    found = use_over_time(small_schedule(), timeline(0, 50, 10, 40, 20, 80), [0, 50, 200])
    assert found["h2d"] == pytest.approx([0, 512 / 150])
