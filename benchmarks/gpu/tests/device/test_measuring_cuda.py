"""A measuring session on CUDA, with torch's few calls replaced: one arena, many schedules."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.device import measuring
from benchmarks.gpu.device.measuring import MeasuringSession
from tests.helpers.fake_cudart import FakeCudart
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.fake_nvml import FakeNvml
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.device_memory import DeviceMemoryError
from twinstream.executor.memory.pinned import Pinning
from twinstream.executor.run import cuda_run, execute
from twinstream.executor.run.cuda_run import run_on_cuda
from twinstream.executor.run.device_state import DeviceState, StateReader, StateWatch
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.tensors import HOST


class Device:
    """What the driver was asked for."""

    def __init__(self) -> None:
        self.cudart = FakeCudart()
        self.slabs: list[int] = []
        self.freed = 0
        self.free_bytes = 10**9


class Constant(StateWatch):
    """Says how many passes it was asked about; how it reads is tested with NVML's stand-in."""

    def between(self, ends_ns: Sequence[int]) -> list[DeviceState | None]:
        assert list(ends_ns) == sorted(ends_ns)
        return [self._reader.read() for _ in ends_ns[1:]]


@pytest.fixture
def device(monkeypatch) -> Device:
    found = Device()
    replaced = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "current_stream": lambda: None,
        "stream": lambda stream: nullcontext(),
        "mem_get_info": lambda: (found.free_bytes, 2 * 10**9),
        "memory_reserved": lambda: 10**8,
        "get_device_name": lambda: "a GPU of the tests",
        "get_device_capability": lambda: (9, 0),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, call in replaced.items():
        monkeypatch.setattr(torch.cuda, name, call)

    def clear() -> None:
        found.freed += 1

    def slab(size_bytes: int) -> torch.Tensor:
        found.slabs.append(size_bytes)
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def run(job, options):
        gpu = FakeGpu()
        monkeypatch.setattr(cuda_run, "TorchGpu", lambda: gpu)
        return run_on_cuda(
            replace(job, works=gpu.works(job.program, job.works, job.arenas)), options
        )

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(measuring, "_reader", lambda backend: StateReader(FakeNvml(), "handle"))
    monkeypatch.setattr(measuring, "StateWatch", Constant)
    monkeypatch.setattr(measuring, "device_slab", slab)
    monkeypatch.setattr(measuring, "arena_pinning", lambda: Pinning(found.cudart))
    monkeypatch.setattr(execute, "run_on_cuda", run)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.setenv(name, "as the user wants")
    return found


@pytest.fixture(scope="module")
def schedules() -> list[RankSchedule]:
    chain = tiny_chain("packed")
    least = enough_device_bytes(chain, "streaming")
    streaming = planned(chain, MACHINE, Caps(device_bytes=least), "streaming")
    return [planned(chain, MACHINE, Caps(), "resident"), streaming]


def test_memory_is_pinned_once_and_the_device_given_back_after_each_run(device, schedules):
    host_bytes = Arenas.sizes(schedules[1])[HOST] + 10_000
    with MeasuringSession("cuda", host_bytes) as session:
        found = [session.measure(one, 3).losses for one in (*schedules, *schedules)]
        assert found == [found[0]] * 4
        assert list(device.cudart.locked.values()) == [host_bytes]
        assert len(device.slabs) == device.freed == 4
    assert device.cudart.locked == {}
    assert len(device.cudart.asked) == 1
    with MeasuringSession("cpu") as session:
        assert session.measure(schedules[0], 3).losses == found[0]


def test_an_arena_in_pieces_is_a_little_larger_and_never_pinned_again(
    device, schedules, monkeypatch
):
    size = Arenas.sizes(schedules[1])[HOST]
    most = size * 2 // 3 // 4096 * 4096
    monkeypatch.setattr(measuring, "MAX_PIECE_BYTES", most)
    monkeypatch.setattr(measuring, "_PIECE_SLACK_BYTES", most)
    monkeypatch.setattr(
        measuring, "arena_pinning", lambda: Pinning(device.cudart, max_piece_bytes=most)
    )
    with MeasuringSession("cuda") as session:
        session.take_host(size)
        pinned = len(device.cudart.asked)
        assert pinned > 1
        assert sum(device.cudart.locked.values()) == size + most
        found = [session.measure(one, 3).losses for one in (*schedules, schedules[1])]
        assert found == [found[0]] * 3
        assert len(device.cudart.asked) == pinned


def test_every_pass_has_the_clock_it_ran_at(device, schedules):
    with MeasuringSession("cuda") as session:
        states = session.measure(schedules[1], 3).states
    assert [state.sm_clock_mhz for state in states if state] == [1980.0] * 3


def test_an_arena_over_the_devices_memory_is_a_sentence_and_the_session_goes_on(device, schedules):
    with MeasuringSession("cuda") as session:
        device.free_bytes = 1000
        with pytest.raises(DeviceMemoryError, match="plan with a smaller --device-mem"):
            session.measure(schedules[0], 2)
        device.free_bytes = 10**9
        assert session.measure(schedules[0], 2).losses
