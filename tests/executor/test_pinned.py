"""The pinned arena with a driver of the tests: what is locked is unlocked, however it ends."""

import pytest
import torch

from tests.helpers.fake_cudart import FakeCudart
from twinstream.executor.memory import pinned
from twinstream.executor.memory.host_limits import HostLimits, HostMemoryError
from twinstream.executor.memory.pinned import Pinning, pinned_arena
from twinstream.executor.memory.pinned_pieces import HostRange, NoBoundaryError

MIB = 2**20
SLOTS = [HostRange(i * MIB, (i + 1) * MIB, f"s{i}") for i in range(6)]


def pinning(cudart: FakeCudart, told: list[tuple[int, int]] | None = None) -> Pinning:
    def on_progress(done: int, total: int) -> None:
        if told is not None:
            told.append((done, total))

    return Pinning(
        cudart,
        max_piece_bytes=2 * MIB,
        on_progress=on_progress,
        clear_error=cudart.clear_error,
    )


def test_the_arena_is_zeros_in_pieces_that_are_locked_while_it_is_open():
    cudart, told = FakeCudart(), list[tuple[int, int]]()
    with pinned_arena(6 * MIB, SLOTS, pinning(cudart, told)) as memory:
        assert sorted(cudart.locked.values()) == [2 * MIB] * 3
        assert memory.numel() == 6 * MIB
        for found in SLOTS:
            view = memory[found.start : found.end]
            assert view.count_nonzero() == 0
            view.fill_(int(found.slot[1]))
        assert [int(memory[r.end - 1 : r.end]) for r in SLOTS] == list(range(6))
        memory.fill_(7)
        assert torch.all(memory[5 * MIB : 6 * MIB] == 7)
    assert cudart.locked == {}
    assert told == sorted(told)
    assert told[-1] == (6 * MIB, 6 * MIB)


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_piece_that_the_driver_refuses_ends_with_numbers_and_nothing_locked(piece, monkeypatch):
    monkeypatch.setattr(pinned, "host_limits", lambda: HostLimits(65536, 9 * MIB, 8 * MIB))
    cudart = FakeCudart(fails_at=piece)
    message = rf"cannot pin 2\.00 MiB of 6\.00 MiB .*error 2, with {2 * piece or 0}.*B pinned"
    with (
        pytest.raises(HostMemoryError, match=message) as raised,
        pinned_arena(6 * MIB, SLOTS, pinning(cudart)),
    ):
        raise AssertionError("never opened")
    assert "RLIMIT_MEMLOCK 64.00 KiB, left in the cgroup 9.00 MiB, available 8.00 MiB" in str(
        raised.value
    )
    assert len(cudart.asked) == piece + 1
    assert cudart.locked == {}
    assert cudart.last_error == 0, "torch's next kernel would raise it"


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_ctrl_c_while_a_piece_is_locked_leaves_none_locked(piece):
    """The driver has done its work and the interrupt comes before anyone could note it."""
    cudart = FakeCudart(interrupted_at=piece)
    with pytest.raises(KeyboardInterrupt), pinned_arena(6 * MIB, SLOTS, pinning(cudart)):
        raise AssertionError("never opened")
    assert cudart.locked == {}


def test_ctrl_c_while_pages_are_touched_leaves_none_locked():
    cudart = FakeCudart()

    def interrupt(done: int, total: int) -> None:
        if done > 2 * MIB:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        pinned_arena(6 * MIB, SLOTS, Pinning(cudart, frozenset(), 2 * MIB, interrupt)),
    ):
        raise AssertionError("never opened")
    assert cudart.asked
    assert cudart.locked == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("capture failed"), SystemExit])
def test_an_error_while_it_is_open_unlocks_everything(error):
    cudart = FakeCudart()
    with (
        pytest.raises(error if isinstance(error, type) else type(error)),
        pinned_arena(6 * MIB, SLOTS, pinning(cudart)),
    ):
        raise error
    assert len(cudart.asked) == 3
    assert cudart.locked == {}


def test_an_arena_that_cannot_be_cut_is_refused_before_anything_is_touched(monkeypatch):
    monkeypatch.setattr(pinned, "_mapped", lambda size_bytes: pytest.fail("memory was mapped"))
    ranges = [HostRange(0, 6 * MIB, "all")]
    with (
        pytest.raises(NoBoundaryError),
        pinned_arena(6 * MIB, ranges, pinning(FakeCudart())),
    ):
        raise AssertionError("never opened")
