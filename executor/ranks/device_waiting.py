"""Find what a rank on a GPU waits for. Its host only enqueues: events say where streams are.

Not yet run on a GPU (see docs/benchmarks/README.md). It is tested with stand-ins.
"""

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns

import torch

from twinstream.executor.backends.gpu import GpuEvent
from twinstream.executor.ranks.errors import CommunicationError
from twinstream.executor.ranks.waiting import Wait, Waiting, waited_too_long
from twinstream.schedule.cluster.projecting import RankPart

_EVERY_S = 0.2


@dataclass
class _Enqueued:
    """An op between two events; while it is called there is no second."""

    wait: Wait
    begun: GpuEvent
    ended: GpuEvent | None = None

    @property
    def is_through(self) -> bool:
        return self.ended is not None and self.ended.query()


OnFailure = Callable[[CommunicationError], None]


def waiting_on(device: torch.device, timeout_s: float, on_failure: OnFailure | None) -> Waiting:
    """Return the `Waiting` for a rank on that device."""
    if device.type == "cpu":
        return Waiting(on_failure)
    return DeviceWaiting(_mark, timeout_s, on_failure, partial(torch.cuda.set_device, device))


def _mark() -> GpuEvent:
    event: GpuEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream())
    return event


def _not_opened(rank: int, limit_s: float) -> CommunicationError:
    return CommunicationError(
        f"rank {rank} waited {limit_s:g} s for the GPUs of all ranks to meet by NCCL: can they "
        "reach one another? NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 goes through the host",
        rank=rank, op_id=None, peers=(), cause="failed",
    )  # fmt: skip


class DeviceWaiting(Waiting):
    """A `Waiting` of ops that begin and end on the device; a thread watches them meanwhile.

    An op waits for others from when its stream has come to it; it may have been enqueued a pass
    before that. NCCL's own timeout counts from there, and is not used.

    Args:
        mark: a new event, recorded on the current stream.
        timeout_s: how long an op may wait for others.
        enter: called first in the thread that looks; a new one has the first GPU of the machine.
    """

    def __init__(
        self,
        mark: Callable[[], GpuEvent],
        timeout_s: float,
        on_failure: OnFailure | None = None,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(on_failure)
        self._mark, self._timeout_s, self._enter = mark, timeout_s, enter
        self._streams: dict[str, deque[_Enqueued]] = defaultdict(deque)

    @contextlib.contextmanager
    def during(self, stream: str, wait: Wait) -> Iterator[None]:
        op = _Enqueued(wait, self._mark())
        self._streams[stream].append(op)
        yield
        op.ended = self._mark()

    @contextlib.contextmanager
    def opening(self, rank: int, limit_s: float) -> Iterator[None]:
        timer = threading.Timer(limit_s, self.failed, [_not_opened(rank, limit_s)])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def watched_over(self, part: RankPart) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            self._enter()
            while not over.wait(_EVERY_S):
                self.look(part)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def look(self, part: RankPart) -> None:
        """See where the streams are, and fail with the first op that waits for too long."""
        now_ns = perf_counter_ns()
        for stream, ops in list(self._streams.items()):
            while ops and ops[0].is_through:
                ops.popleft()
            if not ops or not ops[0].begun.query():
                self.now.pop(stream, None)
                continue
            head, known = ops[0].wait, self.now.get(stream)
            if known is None or (known.op_id, known.pass_number) != (head.op_id, head.pass_number):
                self.now[stream] = known = replace(head, since_ns=now_ns)
            if now_ns - known.since_ns > self._timeout_s * 1e9:
                self.failed(waited_too_long(part, known))
