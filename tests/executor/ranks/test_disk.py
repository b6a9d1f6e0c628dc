"""Ranks with a drive: each has a file of its own there, and all of them share its rates."""

import errno
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.ranks.test_pipelines import given
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import bits_of
from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.clusters.predict import gpu_caps, planned_ranks
from twinstream.clusters.shared_machine import place_here
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.errors import RanksError
from twinstream.executor.ranks.rank_run import RankInputs
from twinstream.executor.weights.disk_reader import DiskFiles
from twinstream.measures.wear import wear_notes, written_bytes
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.choices import OPEN
from twinstream.planner.request import with_drive
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Copy
from twinstream.simulator.network_costs import share_of
from twinstream.simulator.replay import simulate

SPEC = small("tiny", num_layers=4)
WORKLOAD = WORKLOADS["packed"].model_copy(update={"rounds_per_step": 2})
DRIVE = with_drive(MACHINE, "2GB/s,1GB/s")
CAPS = Caps(device_bytes=300_000, host_bytes=300_000, disk_bytes=2**30)


def job(**layout: Any) -> Job:
    return Job.of_step(SPEC, WORKLOAD, Recipe(), Layout(**layout))


@cache
def stages() -> Schedule:
    """Two, each of which writes to the drive."""
    found = plan_pipeline(job(pp=2), DRIVE, CAPS)
    parts = [found.of(one) for one in found.classes]
    assert all(any(op.stream.queue == "disk_write" for op in part.ops) for part in parts)
    return found


def moved(schedule: Schedule, queue: str) -> int:
    """Bytes of a step that all ranks read from the drive, or write there."""
    found = 0
    for one in schedule.classes:
        part = schedule.of(one)
        sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
        ops = [op for op in part.ops if isinstance(op, Copy) and op.stream.queue == queue]
        found += schedule.num_ranks(one) * sum(sizes[op.tensor] for op in ops)
    return found


def with_file(place: Path) -> RunOptions:
    return RunOptions(num_passes=3, disk=DiskFiles({}, 1e9, place=place))


def test_stages_that_write_to_a_drive_have_the_bits_of_one_device(
    two: RankProcesses, tmp_path: Path
) -> None:
    outcomes = two.execute(stages(), partial(given), with_file(tmp_path))
    expected = bits_of(planned(lower(SPEC, WORKLOAD), MACHINE, Caps(), "resident"))
    found = {name: flat for outcome in outcomes for name, flat in outcome.state.items()}
    assert found.keys() == expected.state.keys()
    assert all(torch.equal(found[name], flat) for name, flat in expected.state.items())
    assert not list(tmp_path.iterdir())


def failing(call: str, number: int, after: int, part: RankPart) -> RankInputs:
    """On rank 1 a call of the system fails, after so many."""
    if part.rank == 1:
        real, left = getattr(os, call), [after]

        def fails(*given: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
            return real(*given)

        setattr(os, call, fails)
    return given(part)


@pytest.mark.parametrize(
    ("call", "number", "after", "message"),
    [
        ("posix_fallocate", errno.ENOSPC, 0, r"^rank 1: .* has no room for a file of .*Make room"),
        ("preadv", errno.EIO, 20, r"^rank 1: .*cannot be (read|written): Input/output error"),
        ("pwritev", errno.EIO, 20, r"^rank 1: .*cannot be written: Input/output error"),
    ],
)
def test_a_drive_that_fails_one_rank_ends_all_with_one_message(
    tmp_path: Path, call: str, number: int, after: int, message: str
) -> None:
    make = partial(failing, call, number, after)
    with (
        RankProcesses(2, start_method="forkserver") as processes,
        pytest.raises(RanksError, match=message) as ended,
    ):
        processes.execute(stages(), make, with_file(tmp_path))
    assert "\n" not in str(ended.value)
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_node_share_its_drive() -> None:
    """What all read and write in a step takes no less than the drive does for it."""
    place = place_here(DRIVE, 2, num_cores=2)
    caps = gpu_caps(place.cluster, place.machine, 2).model_copy(
        update={"device_bytes": 300_000, "host_bytes": 250_000, "disk_bytes": 2**30}
    )
    slow = with_drive(place.machine, "20MB/s,10MB/s")
    few = Job.of_step(
        SPEC, WORKLOADS["packed"], Recipe(),
        Layout(dp=2, zero=1),
    )  # fmt: skip
    schedule = planned_ranks(few, place.cluster, slow, caps, OPEN)
    read, written = moved(schedule, "disk_read"), moved(schedule, "disk_write")
    assert read and written
    step_ns = simulate(schedule, slow, place.cluster).step_ns
    assert step_ns >= (read / 20e6 + written / 10e6) * 1e9
    assert share_of(slow, 2).number("disk_write_bytes_per_s") == 5e6
    assert written_bytes(schedule) == written
    (told,) = wear_notes(schedule, slow, 1.0)
    assert f"{written * 86_400 / 1e12:,.2f} TB a day" in told
