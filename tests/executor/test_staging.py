"""State through pinned pieces, with events of the tests: no piece is used before it is free."""

from collections import deque

import pytest
import torch

from twinstream.executor.memory import staging as staging_module
from twinstream.executor.memory.staging import Staging

PIECE = 8


class Link:
    """Copies to and from the device happen only when somebody waits for the event behind them."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self.num_enqueued = self.most_waiting = 0
        self.pinned = 0

    def copied(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.num_enqueued += 1
        self.waiting.append((self.num_enqueued, destination, source))
        self.most_waiting = max(self.most_waiting, len(self.waiting))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    found, copy, empty = Link(), torch.Tensor.copy_, torch.empty

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "the host would spin"
            self.behind = 0

        def record(self) -> None:
            self.behind = found.num_enqueued

        def synchronize(self) -> None:
            while found.waiting and found.waiting[0][0] <= self.behind:
                copy(*found.waiting.popleft()[1:])

    def copied(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        found.copied(self, source) if non_blocking else copy(self, source)

    def pinned(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        found.pinned += size
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(staging_module.torch, "empty", pinned)
    return found


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 5 * PIECE + 3])
def test_tensors_arrive_whole_and_two_pieces_do(size: int, link: Link) -> None:
    staging = Staging(PIECE)
    sources = [torch.arange(size, dtype=torch.uint8) + number for number in range(3)]
    on_device = [torch.full_like(source, 99) for source in sources]
    for device, source in zip(on_device, sources, strict=True):
        before = source.clone()
        staging.to_device(device, source)
        source.zero_()  # its bytes have been taken
        source.add_(before)
    while link.waiting:
        _, device, pinned = link.waiting.popleft()
        device[:] = pinned
    assert all(map(torch.equal, on_device, sources))
    back = [torch.full_like(source, 99) for source in sources]
    for host, device in zip(back, on_device, strict=True):
        staging.to_host(host, device)
        assert torch.equal(host, device), "it is complete on return"
    assert link.pinned <= 2 * PIECE
    assert link.most_waiting <= 2
    assert link.most_waiting == (2 if size else 0)


def test_between_memories_of_the_host_nothing_is_pinned() -> None:
    found = torch.zeros(20, dtype=torch.uint8)
    Staging(PIECE).copy(found, torch.arange(20, dtype=torch.uint8))
    assert found.tolist() == list(range(20))
