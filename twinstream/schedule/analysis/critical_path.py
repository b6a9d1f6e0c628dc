"""The critical path of a step: the chain of ops, each released by the one before, that it took."""

from collections.abc import Sequence

from pydantic import NonNegativeInt

from twinstream.schedule.document import Schedule
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Stream
from twinstream.schedule.timeline import PassSpans, Timeline


class PathPiece(Node):
    """A stretch of the critical path: an op, or the latency between two (`op_id` is None)."""

    op_id: str | None
    start_ns: NonNegativeInt
    end_ns: NonNegativeInt


def critical_path(schedule: Schedule, timeline: Timeline) -> list[PathPiece]:
    """Pieces of the last pass, in order and without gaps, that end with its last compute op.

    An op is released by the op that ended last of its stream's predecessor and its waits. The path
    begins where compute ended in the pass before, or with the pass if that is not known; what is
    before is cut off. Without compute on device 0 it ends with the op that ends last.
    """
    releases = releases_of(schedule)
    end = _last_op(schedule, timeline)
    passes = timeline.passes[-2:]
    begin_ns = passes[0].end_ns[end] if len(passes) > 1 else min(passes[0].start_ns)
    pieces: list[PathPiece] = []
    number, now_ns = len(passes) - 1, passes[-1].end_ns[end]
    while now_ns > begin_ns:
        start_ns = min(now_ns, max(begin_ns, passes[number].start_ns[end]))
        _add(pieces, schedule.ops[end].op_id, start_ns, now_ns)
        released = released_by(releases[end], passes, number)
        if released is None:
            _add(pieces, None, begin_ns, start_ns)
            break
        number, end = released
        now_ns = min(start_ns, max(begin_ns, passes[number].end_ns[end]))
        _add(pieces, None, now_ns, start_ns)
    return pieces[::-1]


def _add(pieces: list[PathPiece], op_id: str | None, start_ns: int, end_ns: int) -> None:
    if end_ns > start_ns:
        pieces.append(PathPiece(op_id=op_id, start_ns=start_ns, end_ns=end_ns))


def _last_op(schedule: Schedule, timeline: Timeline) -> int:
    compute = Stream(queue="compute")
    mine = [i for i, op in enumerate(schedule.ops) if op.stream == compute]
    ends = timeline.passes[-1].end_ns
    return mine[-1] if mine else max(range(len(ends)), key=ends.__getitem__)


def releases_of(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Of each op, what releases it: (passes back, position)."""
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    last_of = {op.stream: i for i, op in enumerate(schedule.ops)}
    before: dict[Stream, int] = {}
    found: list[list[tuple[int, int]]] = []
    for i, op in enumerate(schedule.ops):
        is_first = op.stream not in before
        predecessor = last_of[op.stream] if is_first else before[op.stream]
        waits = [(0, position[wait]) for wait in op.waits]
        waits += [(1, position[wait]) for wait in op.waits_previous]
        found.append([(int(is_first), predecessor), *waits])
        before[op.stream] = i
    return found


def released_by(
    releases: Sequence[tuple[int, int]], passes: Sequence[PassSpans], number: int
) -> tuple[int, int] | None:
    """(pass, position) of what ended last; None where all of it is in a pass that is not known."""
    known = [(number - back, i) for back, i in releases if number >= back]
    return max(known, key=lambda at: (passes[at[0]].end_ns[at[1]], at), default=None)
