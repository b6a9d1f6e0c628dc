"""Schedules that read a frozen base from files: the bits of those that have it in memory."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.helpers.disk_plans import LORA, SPEC, TRAINED, disk_plan, written_plan
from tests.helpers.fake_cuda import on_cuda
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.runs import run, training
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.disk_arena import DiskArena
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.cuda_run import CudaJob, run_on_cuda
from twinstream.executor.run.work import bind_works
from twinstream.executor.state.training_state import (
    fill_carried,
    initial_state,
    read_carried,
    take_carried,
)
from twinstream.executor.weights.disk_reader import DiskFiles, FileExtent
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.tensors import DISK

ADAPTERS = [f"param.lora.{layer}" for layer in range(SPEC.num_layers)]


@pytest.fixture
def files(tmp_path: Path) -> DiskFiles:
    """Every group of the base in one file, at an offset that is no multiple of anything."""
    path, extents = tmp_path / "base.bin", {}
    with path.open("wb") as file:
        file.write(b"head")
        for name, flat in initial_state(SPEC, 1, LORA).items():
            if name.startswith("param.") and "lora" not in name:
                extents[name] = (FileExtent(path, file.tell(), flat.numel(), 0),)
                file.write(flat.numpy().tobytes() + b"odd")
    return DiskFiles(extents, 1e9)


@pytest.fixture(scope="module")
def plan() -> RankSchedule:
    return disk_plan(chunk_tokens=32)


def test_a_base_on_a_disk_has_the_bits_of_one_in_memory(
    plan: RankSchedule, files: DiskFiles
) -> None:
    """With bytes poisoned before they are written and once they are dead, too."""
    _, expected = run(disk_plan(host_mem="2MiB", chunk_tokens=32), RunOptions(num_passes=3))
    for poison in (False, True):
        execution, found = run(plan, RunOptions(num_passes=3, poison=poison, disk=files))
        assert found.losses == expected.losses
        assert all(torch.equal(found.state[name], expected.state[name]) for name in ADAPTERS)
    reads = [op.op_id for op in plan.ops if op.stream.queue == "disk_read"]
    ends = dict(zip(execution.timeline.op_ids, execution.timeline.passes[-1].end_ns, strict=True))
    assert reads and all(ends[read] > 0 for read in reads)


def test_without_files_nothing_runs(plan: RankSchedule, files: DiskFiles) -> None:
    lacking = DiskFiles(dict(list(files.extents.items())[:1]), 1e9)
    for given in (None, lacking):
        with pytest.raises(TwinstreamError, match="at home on a disk"):
            run(plan, RunOptions(num_passes=1, disk=given))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], FakeGpu]]:
    yield lambda seed: on_cuda(monkeypatch, FakeGpu(seed))


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_reads_are_the_hosts_beside_a_gpu(
    plan: RankSchedule, files: DiskFiles, graphs: str, gpu: Callable[[int], FakeGpu]
) -> None:
    """The device's streams run in any order that their waits allow; threads read meanwhile."""
    _, expected = run(plan, RunOptions(num_passes=4, disk=files))
    loop, state, device = training(plan), initial_state(SPEC, 1, LORA), gpu(7)
    sizes = Arenas.sizes(plan)
    assert DISK not in sizes
    with closing(DiskArena(plan, files)) as disk:
        memory = {t: torch.zeros(size, dtype=torch.uint8) for t, size in sizes.items()}
        arenas, program = Arenas(plan, memory | {DISK: disk}), compile_program(plan)
        works = device.works(program, bind_works(plan, arenas, loop.host_work(plan)), arenas)
        job = CudaJob(plan, program, arenas, works, lambda: fill_carried(plan, arenas, state))
        run_on_cuda(job, RunOptions("cuda", num_passes=4, graphs=graphs))  # type: ignore[arg-type]
        after = read_carried(plan, arenas, state)
        name = next(iter(c.tensor for c in plan.carried if c.slot.startswith("disk.")))
        assert torch.equal(take_carried(plan, arenas, name), state[name])
    assert tuple(loop.losses) == expected.losses
    assert all(torch.equal(after[name], expected.state[name]) for name in ADAPTERS)


def test_a_checkpoint_reads_no_more_of_a_drive_than_it_writes(tmp_path: Path) -> None:
    """Block by block: so many bytes of optimizer state are asked for, and those alone are read."""
    plan = written_plan()
    name = next(c.tensor for c in plan.carried if c.slot.startswith("disk.opt"))
    state = initial_state(SPEC, 1, TRAINED)
    with closing(DiskArena(plan, DiskFiles({}, 1e9, place=tmp_path))) as disk:
        memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(plan).items()}
        arenas = Arenas(plan, memory | {DISK: disk})
        fill_carried(plan, arenas, state)
        asked: list[int] = []
        read = disk.read
        disk.read = lambda low, high, into: asked.append(high - low) or read(low, high, into)
        size, step = state[name].numel(), 50_000
        for start in range(0, size, step):
            stop = min(size, start + step)
            found = take_carried(plan, arenas, name, start, stop)
            assert torch.equal(found, state[name][start:stop])
        assert sum(asked) == size and max(asked) == step
        assert torch.equal(read_carried(plan, arenas, state)[name], state[name])


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_writes_are_the_hosts_beside_a_gpu(
    tmp_path: Path, graphs: str, gpu: Callable[[int], FakeGpu]
) -> None:
    """The device's streams run in any order that their waits allow; threads write meanwhile."""
    plan, files = written_plan(), DiskFiles({}, 1e9, place=tmp_path)
    _, expected = run(plan, RunOptions(num_passes=4, disk=files, poison=True))
    loop, state, device = training(plan), initial_state(SPEC, 1, TRAINED), gpu(7)
    with closing(DiskArena(plan, files)) as disk:
        memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(plan).items()}
        arenas, program = Arenas(plan, memory | {DISK: disk}), compile_program(plan)
        works = device.works(program, bind_works(plan, arenas, loop.host_work(plan)), arenas)
        job = CudaJob(plan, program, arenas, works, lambda: fill_carried(plan, arenas, state))
        run_on_cuda(job, RunOptions("cuda", num_passes=4, graphs=graphs))  # type: ignore[arg-type]
        after = read_carried(plan, arenas, state)
    assert tuple(loop.losses) == expected.losses
    assert all(torch.equal(after[name], flat) for name, flat in expected.state.items())
