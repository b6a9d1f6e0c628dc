"""The critical path of a step: the chain of ops, each released by the one before, that it took."""

from collections.abc import Sequence

from pydantic import NonNegativeInt

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Stream
from twinstream.schedule.timeline import PassSpans, RankTimeline


class PathPiece(Node):
    """A stretch of the critical path: an op, or the latency between two (`op_id` is None)."""

    op_id: str | None
    start_ns: NonNegativeInt
    end_ns: NonNegativeInt


def critical_path(schedule: RankSchedule, timeline: RankTimeline) -> list[PathPiece]:
    """Pieces of the last pass, in order and without gaps, that end with its last compute op.

    An op is released by the op that ended last of its stream's predecessor and its waits. The path
    begins where compute ended in the pass before, or with the pass if that is not known; what is
    before is cut off. Without compute on device 0 it ends with the op that ends last.
    """
    releases = Releases(schedule)
    end = _last_op(schedule, timeline)
    passes = timeline.passes[-2:]
    begin_ns = passes[0].end_ns[end] if len(passes) > 1 else min(passes[0].start_ns)
    pieces: list[PathPiece] = []
    number, now_ns = len(passes) - 1, passes[-1].end_ns[end]
    while now_ns > begin_ns:
        start_ns = min(now_ns, max(begin_ns, passes[number].start_ns[end]))
        _add(pieces, schedule.ops[end].op_id, start_ns, now_ns)
        released = releases.last(end, passes, number)
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


def _last_op(schedule: RankSchedule, timeline: RankTimeline) -> int:
    compute = Stream(queue="compute")
    mine = [i for i, op in enumerate(schedule.ops) if op.stream == compute]
    ends = timeline.passes[-1].end_ns
    return mine[-1] if mine else max(range(len(ends)), key=ends.__getitem__)


class Releases:
    """What releases each op of a schedule: the op before it on its stream, and its waits."""

    def __init__(self, schedule: RankSchedule) -> None:
        self._ops = schedule.ops
        self._position = {op.op_id: i for i, op in enumerate(schedule.ops)}
        streams = [(op.stream.device, op.stream.queue) for op in schedule.ops]
        last = {stream: i for i, stream in enumerate(streams)}
        before: dict[tuple[int, str], int] = {}
        self._before: list[tuple[int, int]] = []  # (passes back, position)
        for i, stream in enumerate(streams):
            first = stream not in before
            self._before.append((int(first), last[stream] if first else before[stream]))
            before[stream] = i

    def of(self, at: int) -> list[tuple[int, int]]:
        """Return what releases one op, as (passes back, position)."""
        op = self._ops[at]
        waits = [(0, self._position[wait]) for wait in op.waits]
        return [self._before[at], *waits, *((1, self._position[w]) for w in op.waits_previous)]

    def last(self, at: int, passes: Sequence[PassSpans], number: int) -> tuple[int, int] | None:
        """(pass, position) of what ended last; None where all of it is in a pass not known."""
        known = [(number - back, i) for back, i in self.of(at) if number >= back]
        return max(known, key=lambda at: (passes[at[0]].end_ns[at[1]], at), default=None)
