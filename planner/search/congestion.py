"""Find where compute waited for copies in a simulated schedule, and give the program less of the
links there.

The program believes that a link can be used fully at all times. Where a real queue was late, the
program gets a smaller share of the link beside those tasks, and decides again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import SearchLimits
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import HOST_COMPUTE, Compute, Copy, Op
from twinstream.schedule.timeline import PassSpans

_LEAST_STALL_NS = 5_000
_LEAST_PAUSE_NS = 50_000

Shares = Mapping[str, tuple[float, ...]]  # of each link, by task


@dataclass(frozen=True)
class Stall:
    """Compute waited `waited_ns` before an op for a copy whose queue was busy since `since_ns`."""

    op: int
    queue: str
    waited_ns: int
    since_ns: int


def less_where_waited(
    shares: Shares,
    schedule: RankSchedule,
    spans: PassSpans,
    views: tuple[ChainView, ChainView],
    limits: SearchLimits,
) -> Shares | None:
    """Shares of the links, by task of the small chain, less where queues were late; None if none.

    Args:
        shares: those that the schedule was made with.
        schedule: what was simulated.
        spans: of its ops.
        views: of the simulated rounds, and of the rounds of the program.
        limits: how much less.
    """
    found = [stall for stall in stalls(schedule, spans) if stall.queue in shares]
    if not found:
        return None
    (few, small), num_tasks = views, len(views[1].chain.tasks)
    number = {small.folding.place(i): i for i in range(num_tasks)}
    folding, position = few.folding, few.position
    starts = [
        (spans.start_ns[i], position[op.task])
        for i, op in enumerate(schedule.ops)
        if _is_of_device(op) and op.task in position
    ]
    start_ns = np.asarray([start for start, _ in starts])
    lessened = {way: np.zeros(num_tasks) for way in shares}
    rounds = np.zeros(num_tasks)
    for i in range(len(few.chain.tasks)):
        rounds[number[folding.place(i)]] += 1
    for stall in found:
        end_ns = spans.start_ns[stall.op]
        low, high = np.searchsorted(start_ns, [stall.since_ns, end_ns])
        # the queue was busy all that time: without this share of its load it would not be late
        part = stall.waited_ns / max(1, end_ns - stall.since_ns)
        for _, task in starts[max(0, low - 1) : high]:
            place = number[folding.place(task)]
            lessened[stall.queue][place] += part / rounds[place]
    less_of_each = {
        way: tuple(
            max(limits.least_share, share * (1.0 - limits.zeal * min(0.5, less)))
            for share, less in zip(shares[way], lessened[way].tolist(), strict=True)
        )
        for way in shares
    }
    return less_of_each if less_of_each != shares else None


def stalls(schedule: RankSchedule, spans: PassSpans) -> list[Stall]:
    """Return all waits of compute for copies, in order."""
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    busy_since = _busy_since(schedule, spans)
    found: list[Stall] = []
    before: int | None = None
    for i, op in enumerate(schedule.ops):
        if not _is_of_device(op):
            continue
        waited_ns = 0 if before is None else spans.start_ns[i] - spans.end_ns[before]
        before = i
        copies = [j for w in op.waits if isinstance(schedule.ops[j := position[w]], Copy)]
        if waited_ns < _LEAST_STALL_NS or not copies:
            continue
        last = max(copies, key=lambda j: spans.end_ns[j])
        queue = schedule.ops[last].stream.queue
        found.append(Stall(i, queue, waited_ns, int(busy_since[last])))
    return found


def _is_of_device(op: Op) -> TypeGuard[Compute]:
    return isinstance(op, Compute) and op.stream.queue != HOST_COMPUTE


def _busy_since(schedule: RankSchedule, spans: PassSpans) -> NDArray[np.int64]:
    """For each op since when its queue has been busy without a pause."""
    since = np.zeros(len(schedule.ops), dtype=np.int64)
    last: dict[str, int] = {}
    for i, op in enumerate(schedule.ops):
        queue = str(op.stream)
        j = last.get(queue)
        if j is not None and spans.start_ns[i] - spans.end_ns[j] < _LEAST_PAUSE_NS:
            since[i] = since[j]
        else:
            since[i] = spans.start_ns[i]
        last[queue] = i
    return since


def scaled(shares: Shares, factor: float) -> Shares:
    """Return the shares of the links scaled by one factor, beside every task."""
    return {way: tuple(factor * share for share in of) for way, of in shares.items()}
