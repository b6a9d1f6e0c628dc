"""Torch's GPU with torch's own calls replaced: what the fake GPU of the other tests stands for."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from twinstream.executor.backends.gpu import TorchGpu


class Allocator:
    """Counts a pool's users as torch's does: a refused capture leaves it recording, and counted."""

    def __init__(self) -> None:
        self.users: dict[Any, int] = {}
        self.recording: set[Any] = set()

    def begin(self, pool: Any) -> None:
        self.users[pool] += 1
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.add(pool)

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


@pytest.fixture(params=["raises first", "ends recording first"])
def gpu(monkeypatch, allocator, request) -> TorchGpu:
    """Torch 2.11 ends a refused capture before its recording, others the other way round."""

    class Pool:
        def __init__(self) -> None:
            self.id = (0, len(allocator.users) + 1)
            allocator.users[self.id] = 1

        def use_count(self) -> int:
            return allocator.users[self.id]

    class Graph:
        pool: Any = None

        def reset(self) -> None:
            if self.pool is not None:
                allocator.release(0, self.pool)
            self.pool = None

    @contextlib.contextmanager
    def graph(made: Graph, *, pool: Any, stream: object, capture_error_mode: str) -> Iterator[None]:
        allocator.begin(pool)
        try:
            yield
        except RuntimeError:
            if request.param == "ends recording first":
                allocator.end(0, pool)
            raise
        allocator.end(0, pool)
        made.pool = pool

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release)
    return TorchGpu(torch.device("cpu"))


def test_a_refused_capture_gives_the_pool_back_and_others_are_captured(gpu, allocator):
    def refused() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    first = gpu.capture(None, lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted"):
            gpu.capture(None, refused)
    second = gpu.capture(None, lambda: None)
    assert allocator.recording == set()
    assert list(allocator.users.values()) == [3], "the one pool's own, and a graph each"
    first.reset()
    second.reset()
    assert list(allocator.users.values()) == [1], "or torch ends the process with the pool"


def test_a_named_range_is_closed_after_an_error_too(gpu, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    with pytest.raises(KeyError), gpu.named_range("block_forward.3"):
        raise KeyError
    assert calls == ["block_forward.3", "end"]
