"""Requests carried out on a CPU, and what is special on machines that are lent."""

import os

import pytest
import torch

from benchmarks.gpu.device import device_side, facts, requests
from benchmarks.gpu.device.device_side import DeviceSide
from benchmarks.gpu.device.measuring import MeasuringSession
from tests.helpers.fake_cudart import FakeCudart
from twinstream.executor.memory import arena_memory
from twinstream.executor.memory.host_limits import AvailableMemoryError, HostMemoryError
from twinstream.executor.memory.pinned import Pinning
from twinstream.executor.probe import device as probed_device
from twinstream.executor.run.execute import NoCudaError


def test_memory_that_grows_as_it_is_used_is_taken_all_the_same(monkeypatch):
    asked = []

    def take(self, size_bytes, *, heeds_available=True):
        asked.append((size_bytes, heeds_available))
        if heeds_available:
            raise AvailableMemoryError("available memory leaves 20.00 GiB.")

    monkeypatch.setattr(MeasuringSession, "take_host", take)
    taken = DeviceSide("cpu").answer(requests.TakeHostMemory(2**36))
    assert isinstance(taken, requests.Taken)
    assert asked == [(2**36, True), (2**36, False)]
    assert "leaves 20.00 GiB" in taken.note


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, ["set", "described"]), (False, [])])
def test_a_process_sets_the_allocator_before_anything_else_as_a_run_does(
    monkeypatch, has_cuda, expected
):
    """Of both processes, that of cells and that of peers."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(probed_device, "expand_segments", lambda: done.append("set"))
    monkeypatch.setattr(device_side, "describe", lambda backend: done.append("described"))
    side = DeviceSide("cuda")
    if has_cuda:
        side.answer(requests.DescribeDevice())
    assert done == expected
    DeviceSide("cpu")
    assert done == expected


def test_without_a_device_the_first_request_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoCudaError, match="no CUDA device"):
        DeviceSide("cuda").answer(requests.DescribeDevice())


def test_facts_are_noted_and_what_cannot_be_found_out_is_said(tmp_path, monkeypatch):
    found = DeviceSide("cpu").answer(requests.NoteFacts(2**20))
    assert isinstance(found, requests.Facts)
    assert f"torch {torch.__version__}" in found.facts["packages"]
    assert "in all, available" in found.facts["host memory"]
    assert not any(name.startswith("pinning") for name in found.facts), "nothing to pin for"
    monkeypatch.setattr(facts, "_HUGE_PAGES", tmp_path)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(facts, "_CGROUP", tmp_path / "nowhere")
    told = facts.facts_of("cpu", 0)
    assert told["huge pages"] == "enabled always [madvise] never"
    assert told["cgroup"] == f"nothing in {tmp_path / 'nowhere'}"


def test_pinning_is_timed_and_a_driver_that_refuses_is_a_fact(monkeypatch):
    cudart = FakeCudart()
    monkeypatch.setattr(
        arena_memory, "arena_pinning",
        lambda note: Pinning(cudart, on_progress=note, clear_error=cudart.clear_error),
    )  # fmt: skip
    told = facts._pinned(2**22)
    assert "GB/s), of which" in told and "in 1 piece(s)" in told
    assert cudart.locked == {}
    cudart = FakeCudart(fails_at=0)
    assert "HostMemoryError: the driver cannot pin" in facts._told(lambda: facts._pinned(2**22))


def test_torchs_compiler_gets_few_processes_unless_the_user_says(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    DeviceSide("cpu")
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    DeviceSide("cpu")
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "7"


def test_memory_that_the_driver_refuses_is_not_pinned_again(monkeypatch):
    asked = []

    def take(self, size_bytes, *, heeds_available=True):
        asked.append(heeds_available)
        raise HostMemoryError("the driver refuses.")

    monkeypatch.setattr(MeasuringSession, "take_host", take)
    with pytest.raises(HostMemoryError):
        DeviceSide("cpu").answer(requests.TakeHostMemory(2**36))
    assert asked == [True]
