"""The driver's figure against the caps: what is reported, what is refused, and in which words."""

from contextlib import nullcontext

import pytest
import torch

from twinstream.executor.memory import device_memory
from twinstream.executor.memory.device_memory import (
    DeviceMemoryError,
    DeviceMeter,
    MemoryReading,
    expand_segments,
    fix_library_workspaces,
)
from twinstream.schedule.document import Caps

GIB = 2**30
CAPS = Caps(device_bytes=24 * GIB, device_reserve_bytes=GIB)


def meter_of(caps: Caps, *used_gib: float, libraries_gib: float = 0.25) -> DeviceMeter:
    """Of an arena of 22 GiB; the driver's figures come one after the other."""
    figures = iter(used_gib)

    def read() -> MemoryReading:
        return MemoryReading(round(next(figures) * GIB), round((22 + libraries_gib) * GIB))

    return DeviceMeter(caps, 22 * GIB, read)


def test_what_is_in_use_is_reported_by_its_moments_and_its_largest():
    meter = meter_of(CAPS, 22.5, 22.75, 22.75, 22.875)
    meter.warm({})
    found = meter.report()
    assert found.arena_bytes == 22 * GIB
    assert found.before_bytes == GIB // 2
    assert found.warm_bytes == 22.75 * GIB
    assert found.peak_bytes == 22.875 * GIB
    assert found.libraries_bytes == GIB // 4
    assert found.excess_bytes == 0


def test_a_cap_that_would_be_exceeded_is_refused_with_numbers_and_what_to_do():
    meter = meter_of(CAPS, 22.5, 24.5, 24.5, libraries_gib=1.5)
    with pytest.raises(DeviceMemoryError) as raised:
        meter.warm({})
    told = str(raised.value)
    assert "24.50 GiB of the device in use with every kernel warm" in told
    assert "512.00 MiB more than the cap of 24.00 GiB" in told
    assert "22.00 GiB are the arena and 2.50 GiB context and libraries" in told
    assert "1.50 GiB workspaces" in told
    assert "the plan reserves 1.00 GiB" in told
    assert f"device_reserve_bytes in the machine's profile to {round(2.5 * GIB)}" in told


@pytest.mark.parametrize(("peak_gib", "excess_gib"), [(34.0, 0.0), (34.5, 0.5)])
def test_what_other_processes_have_counts_for_no_cap(peak_gib, excess_gib):
    """10 GiB, beside a context of 0.625 GiB."""
    meter = meter_of(CAPS, 32.875, *[peak_gib] * 3)
    if excess_gib:
        with pytest.raises(DeviceMemoryError, match=r"has 24\.50 GiB .* others have 10\.00 GiB"):
            meter.warm({})
    else:
        assert not meter.warm({})
    found = meter.report()
    assert (found.others_bytes, found.excess_bytes) == (10 * GIB, excess_gib * GIB)


@pytest.mark.parametrize(
    "caps", [Caps(), Caps(device_bytes=23 * GIB), Caps(device_reserve_bytes=GIB)]
)
def test_without_a_cap_or_with_one_of_the_arena_alone_nothing_is_refused(caps):
    meter = meter_of(caps, 22.5, 60.0, 60.0, 60.0)
    meter.warm({})
    assert meter.report().excess_bytes == 0


@pytest.mark.parametrize(
    ("capability", "environ", "fixed"),
    [
        ((8, 0), {}, (":4096:8", "32768")),
        ((9, 0), {}, (None, "32768")),  # torch's own is the same, and is not parsed
        ((10, 0), {}, (":4096:8", "32768")),  # only newer versions of torch have the same
        ((8, 0), {"CUBLASLT_WORKSPACE_SIZE": "1"}, (":4096:8", "1")),
        ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, (":16:8", "32768")),
    ],
)
def test_the_libraries_workspaces_are_fixed_unless_the_user_did(
    monkeypatch, capability, environ, fixed
):
    monkeypatch.setattr(device_memory.os, "environ", environ)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    fix_library_workspaces()
    names = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
    assert tuple(environ.get(name) for name in names) == fixed


def test_products_of_bf16_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(device_memory.os, "environ", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True  # torch's default
    fix_library_workspaces()
    assert not matmul.allow_bf16_reduced_precision_reduction


def test_excess_is_reported_where_it_is_not_refused():
    figures = iter([22.5, 24.5, 24.5, 24.5])
    meter = DeviceMeter(
        CAPS, 22 * GIB, lambda: MemoryReading(round(next(figures) * GIB), 22 * GIB),
        refuses_excess=False,
    )  # fmt: skip
    assert meter.warm({})
    assert meter.report().excess_bytes == GIB // 2


# --- torch's allocator


@pytest.fixture
def configured(monkeypatch) -> list[str]:
    """What the allocator was told; allocations come from the host."""
    found: list[str] = []
    empty = torch.empty
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    monkeypatch.setattr(device_memory.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: None)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda size, device: empty(size))
    return found


def test_the_allocator_is_told_to_grow_its_segments(configured):
    assert expand_segments()
    assert configured == ["expandable_segments:True"]


def test_without_nvml_torch_is_not_asked_since_it_would_crash(configured, monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(device_memory.ctypes, "CDLL", missing)
    assert not expand_segments()
    assert configured == []


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_the_user_configured_stays_as_it_is(configured, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert not expand_segments()
    assert configured == []


def test_a_torch_that_cannot_grow_segments_in_a_private_pool_is_told_to_leave_it(
    configured, monkeypatch
):
    def refused(pool: object) -> None:
        raise RuntimeError("MemPool does not currently support expandable_segments")

    monkeypatch.setattr(torch.cuda, "use_mem_pool", refused)
    assert not expand_segments()
    assert configured == ["expandable_segments:True", "expandable_segments:False"]
