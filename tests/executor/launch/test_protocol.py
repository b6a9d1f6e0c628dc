"""Messages pass through a pipe whole, and their arrays as they are."""

import pickle
import threading
from multiprocessing import Pipe

import numpy as np
import pytest

from twinstream.executor.launch.protocol import (
    Batch,
    Continue,
    Evaluate,
    ShouldPause,
    WriteTensor,
    recv,
    send,
)


def through(message: object) -> object:
    """The message at the other end, which reads while it is written."""
    ours, theirs = Pipe()
    writer = threading.Thread(target=send, args=(ours, message))
    writer.start()
    found = recv(theirs)
    writer.join()
    return found


@pytest.mark.parametrize("count", [0, 1, 3_000_000])
def test_a_tensor_may_be_written_to_at_the_other_end(count: int) -> None:
    flat = np.arange(count, dtype=np.uint8)
    found = through(WriteTensor("param.0", flat))
    assert isinstance(found, WriteTensor) and found.name == "param.0"
    assert np.array_equal(found.flat, flat) and found.flat.flags.writeable


def test_all_arrays_of_a_message_arrive_in_their_places() -> None:
    whole = np.arange(48, dtype=np.int32).reshape(2, 24)
    parts = tuple(np.stack([row, row + 1]) for row in whole)
    batches = (Batch(parts, ((20, 4), (24,)), 40), Batch((whole[:, ::2],), None, 0))
    found = through(Evaluate(batches))
    assert isinstance(found, Evaluate)
    for one, other in zip(found.passes, batches, strict=True):
        assert (one.lengths, one.num_targets) == (other.lengths, other.num_targets)
        assert all(map(np.array_equal, one.tokens, other.tokens))
    assert through(ShouldPause(3)) == ShouldPause(3) and through(Continue(False)) == Continue(False)


def test_what_cannot_be_made_again_is_an_error_of_the_message() -> None:
    ours, theirs = Pipe()
    ours.send_bytes((0).to_bytes(4, "big") + pickle.dumps(ShouldPause(1))[:-5])
    with pytest.raises(Exception, match=r"pickle|truncated|EOF|Ran out"):
        recv(theirs)
    send(ours, ShouldPause(2))
    assert recv(theirs) == ShouldPause(2)
    ours.close()
    with pytest.raises(EOFError):
        recv(theirs)
