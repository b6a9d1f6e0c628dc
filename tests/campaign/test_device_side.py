"""Requests carried out on a CPU, and what is special on machines that are lent."""

import pytest
import torch

from twinstream.campaign import device_side, requests
from twinstream.campaign.device_side import DeviceSide, datasheet_of, try_kernels
from twinstream.executor import device_memory
from twinstream.executor.execute import NoCudaError
from twinstream.executor.host_limits import AvailableMemoryError, HostMemoryError
from twinstream.executor.kernels.attention.registry import AttentionNotAvailable
from twinstream.executor.kernels.availability import KernelsUnavailableError
from twinstream.executor.measuring import MeasuringSession
from twinstream.models.recipe import KernelChoice


@pytest.mark.parametrize(
    ("device", "profile"),
    [("NVIDIA H100 80GB HBM3", "h100_datasheet"), ("NVIDIA H200", "h200"), ("Radeon", None)],
)
def test_nominal_rates_are_those_of_the_devices_datasheet(device, profile):
    found = datasheet_of(device)
    assert (found.name if found else None) == profile


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


def test_kernels_that_cannot_run_here_are_refused_with_the_reason(monkeypatch):
    with pytest.raises(AttentionNotAvailable, match="flash4"):
        try_kernels("cpu", KernelChoice(attention="flash4"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelsUnavailableError, match="Triton"):
        try_kernels("cpu", KernelChoice(vector="triton"))


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, ["set", "described"]), (False, [])])
def test_a_process_sets_the_allocator_before_anything_else_as_a_run_does(
    monkeypatch, has_cuda, expected
):
    """Of both processes, that of cells and that of peers: `serve` makes one of these in each."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(device_memory, "expand_segments", lambda: done.append("set"))
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


def test_attention_that_is_not_here_is_refused_with_the_reason():
    side = DeviceSide("cpu")
    refused = side.answer(requests.TryAttention("flash4"))
    assert isinstance(refused, requests.TriedAttention)
    assert refused.refused is not None and "flash4" in refused.refused


def test_memory_that_the_driver_refuses_is_not_pinned_again(monkeypatch):
    asked = []

    def take(self, size_bytes, *, heeds_available=True):
        asked.append(heeds_available)
        raise HostMemoryError("the driver refuses.")

    monkeypatch.setattr(MeasuringSession, "take_host", take)
    with pytest.raises(HostMemoryError):
        DeviceSide("cpu").answer(requests.TakeHostMemory(2**36))
    assert asked == [True]
