"""The memory of a run on CUDA, with a driver of the tests: as large as planned, always released."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.fake_cudart import FakeCudart
from tests.helpers.plans import MACHINE, planned
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.memory import arena_memory as arena_memory_module
from twinstream.executor.memory.arena_memory import arena_memory, device_slab
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.device_memory import DeviceFailedError, DeviceMemoryError
from twinstream.executor.program.options import RunOptions
from twinstream.executor.state.training_state import fill_carried, initial_state, read_carried
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST


@pytest.fixture
def cudart(monkeypatch) -> FakeCudart:
    """Stands for the driver; the device's memory is the host's."""
    found = FakeCudart()
    pci = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: pci)
    monkeypatch.setattr(
        arena_memory_module, "device_slab", lambda size: torch.zeros(size, dtype=torch.uint8)
    )
    return found


def streaming() -> RankSchedule:
    return planned(tiny_chain("packed"), MACHINE, Caps(), "streaming")


def test_the_arenas_are_as_large_as_planned_and_hold_the_state(cudart):
    schedule = streaming()
    told: list[tuple[int, int]] = []
    options = RunOptions("cuda", on_pinned=lambda done, total: told.append((done, total)))
    with arena_memory(schedule, options) as memory:
        assert {tier: found.numel() for tier, found in memory.items()} == {
            tier: arena_bytes(schedule, tier) for tier in (DEVICE, HOST)
        }
        assert sum(cudart.locked.values()) == arena_bytes(schedule, HOST)
        state = initial_state(small(schedule.model.name), 1)
        arenas = Arenas(schedule, memory)
        fill_carried(schedule, arenas, state)
        for name, flat in read_carried(schedule, arenas, state).items():
            assert torch.equal(flat, state[name])
    assert cudart.locked == {}
    assert memory == {}, "the next one's arenas need the room"
    assert told[-1] == (arena_bytes(schedule, HOST),) * 2


def test_a_device_that_fails_is_told_in_one_sentence(cudart, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)
    with (
        pytest.raises(DeviceFailedError, match=r"the GPU has failed .*\(CUDA error: uncorrectable"),
        arena_memory(streaming(), RunOptions("cuda")),
    ):
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCompile")
    assert cudart.locked == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_device_that_fails_at_the_end_too_hides_no_error_and_leaves_nothing_locked(
    cudart, error, monkeypatch
):
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(error, match="the first"), arena_memory(streaming(), RunOptions("cuda")):
        assert cudart.locked
        raise error("the first")
    assert cudart.locked == {}


def test_a_slab_that_the_device_cannot_give_is_told_and_leaves_nothing_locked(cudart, monkeypatch):
    def none_left(*args: object, **how: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(arena_memory_module, "device_slab", device_slab)
    monkeypatch.setattr(torch, "zeros", none_left)
    with (
        pytest.raises(DeviceMemoryError, match=r"cannot be had.*Tried to allocate 2\.00 GiB\. End"),
        arena_memory(streaming(), RunOptions("cuda")),
    ):
        raise AssertionError("never opened")
    assert cudart.asked
    assert cudart.locked == {}


def test_a_slab_larger_than_what_is_free_is_refused_before_anything_is_touched(cudart, monkeypatch):
    schedule = streaming()
    needed = arena_bytes(schedule, DEVICE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed - 1, 2**40))
    with (
        pytest.raises(DeviceMemoryError, match=r"the driver has .* of 1024\.00 GiB free"),
        arena_memory(schedule, RunOptions("cuda")),
    ):
        raise AssertionError("never opened")
    assert cudart.asked == []
