"""Torch's GPU with torch's own calls replaced: what the fake GPU of the other tests stands for."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from twinstream.executor.backends.gpu import TorchGpu


class Pool:
    def __init__(self) -> None:
        self.id = (0, id(self))


@pytest.fixture
def gpu(monkeypatch) -> TorchGpu:
    """Its capture leaves the pool recording when it is refused, as torch's did."""
    recording: set[Any] = set()

    @contextlib.contextmanager
    def graph(
        made: object, *, pool: Any, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        if pool in recording:
            raise RuntimeError("already recording to mempool_id")
        recording.add(pool)
        yield
        recording.remove(pool)

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return TorchGpu(torch.device("cpu"))


def test_after_a_refused_capture_others_are_captured(gpu):
    def refused() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    gpu.capture(None, lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted"):
            gpu.capture(None, refused)
    gpu.capture(None, lambda: None)


def test_a_named_range_is_closed_after_an_error_too(gpu, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    with pytest.raises(KeyError), gpu.named_range("block_forward.3"):
        raise KeyError
    assert calls == ["block_forward.3", "end"]
