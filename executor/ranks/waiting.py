"""Report which ops the streams of this rank are blocked on, when a run does not go on."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from twinstream.executor.program.compiled import Work
from twinstream.executor.ranks.collectives import Call
from twinstream.executor.ranks.errors import Cause, CommunicationError
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.ops import Communicate

_LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "socket")


@dataclass(frozen=True)
class Wait:
    """An op that has begun and not ended, and who else takes part in it.

    The `op_id` of ranks that are through and wait for the others is empty.
    """

    op_id: str
    collective: str
    pass_number: int
    peers: tuple[int, ...]
    since_ns: int

    def __str__(self) -> str:
        if not self.op_id:
            return "the end of the run"
        return f"op '{self.op_id}' ({self.collective}) of pass {self.pass_number}"


class Waiting:
    """Keeps the ops that have begun; tells of the first that fails as soon as it does.

    The run itself ends only when all its streams have, and others may wait for ranks yet.
    """

    def __init__(self, on_failure: Callable[[CommunicationError], None] | None = None) -> None:
        self.now: dict[str, Wait] = {}  # by stream
        self._on_failure = on_failure
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def at_the_end(self, num_ranks: int) -> Iterator[None]:
        """While the rank is through, and waits for all others."""
        ranks = tuple(range(num_ranks))
        self.now["end"] = Wait("", "", 0, ranks, perf_counter_ns())
        try:
            yield
        finally:
            del self.now["end"]

    @contextlib.contextmanager
    def during(self, stream: str, wait: Wait) -> Iterator[None]:
        """While an op of a stream is called; one that fails stays."""
        self.now[stream] = wait
        yield
        del self.now[stream]

    @contextlib.contextmanager
    def opening(self, rank: int, limit_s: float) -> Iterator[None]:
        """While a rank's groups are made, which has a limit of its own on the CPU."""
        del rank, limit_s
        yield

    @contextlib.contextmanager
    def watched_over(self, part: RankPart) -> Iterator[None]:
        """Watch the ops of a rank while its passes run (a context manager)."""
        del part
        yield

    def failed(self, error: CommunicationError) -> None:
        with self._lock:
            tell, self._on_failure = self._on_failure, None
        if tell is not None:
            tell(error)


def watched(
    part: RankPart, op: Communicate, peers: Sequence[int], calls: Sequence[Call], waiting: Waiting
) -> Work:
    """The calls of an op, as its work; what is wrong is said of the op and its ranks."""
    stream, others = str(op.stream), tuple(peers)

    def work(pass_number: int) -> None:
        wait = Wait(op.op_id, op.collective, pass_number, others, perf_counter_ns())
        try:
            with waiting.during(stream, wait):
                for call in calls:
                    call()
        except RuntimeError as error:  # of all that torch.distributed raises
            failure = _failure(part, wait, error)
            waiting.failed(failure)
            raise failure from error

    return work


def waited_too_long(part: RankPart, wait: Wait) -> CommunicationError:
    """Return the error of an op whose peers do not come."""
    waited_s = (perf_counter_ns() - wait.since_ns) / 1e9
    what = f"waited {waited_s:.0f} s for {_peers(wait)} in {wait}"
    return _error(part, wait, "timeout", what)


def _failure(part: RankPart, wait: Wait, error: RuntimeError) -> CommunicationError:
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return waited_too_long(part, wait)
    if any(sign in text for sign in _LOST):
        return _error(part, wait, "lost", f"lost {_peers(wait)} in {wait}")
    what = f"failed in {wait} with {_peers(wait)}: {str(error).splitlines()[0]}"
    return _error(part, wait, "failed", what)


def _peers(wait: Wait) -> str:
    return ("rank " if len(wait.peers) == 1 else "ranks ") + ", ".join(map(str, wait.peers))


def _error(part: RankPart, wait: Wait, cause: Cause, what: str) -> CommunicationError:
    return CommunicationError(
        f"{part.place} {what}", rank=part.rank, op_id=wait.op_id, peers=wait.peers, cause=cause
    )
