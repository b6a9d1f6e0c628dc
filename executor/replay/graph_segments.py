"""Cut a program into pieces that can each be one CUDA graph.

A graph runs on one stream. The wait nodes in it take the records of other streams as they are
when it is launched, as a stream that waits for an event does; so what records must have been
launched before. Pieces are therefore cut so that their waits form no cycle, and launched in an
order in which every wait finds its record made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.executor.program.compiled import Launch, Program
from twinstream.schedule.ops import Compute


@dataclass(frozen=True)
class Segment:
    """Consecutive ops of one stream, by position; launched as a graph or one by one."""

    stream: int
    positions: tuple[int, ...]
    captured: bool


def cut_segments(program: Program, capturable: Sequence[bool]) -> tuple[Segment, ...]:
    """The segments of a pass in the order in which to launch them.

    `capturable` says it of every op. Ops of the host and those that cannot be captured are
    segments of their own. All segments end where a round does, so that rounds look alike.
    """
    cutter = _Cutter(program, capturable)
    for launch in program.launches:
        cutter.add(launch)
    cutter.close_all()
    return tuple(cutter.closed)


class _Open:
    """A segment that is still growing, and those that must be launched before it."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.positions: list[int] = []
        self.after: set[_Open] = set()
        self.closed = False


class _Cutter:
    def __init__(self, program: Program, capturable: Sequence[bool]) -> None:
        self._program = program
        self._capturable = capturable
        self._open: dict[int, _Open] = {}
        self._segment_of: dict[int, _Open] = {}
        self._round: int | None = None
        self.closed: list[Segment] = []

    def add(self, launch: Launch) -> None:
        op = launch.op
        if isinstance(op, Compute) and op.label.round != self._round:
            self._round = op.label.round
            self.close_all()
        if not self._capturable[launch.position]:
            self._add_alone(launch)
            return
        targets = self._open_targets(launch)
        segment = self._open.get(launch.stream)
        if segment is not None and any(_follows(target, segment) for target in targets):
            self._close(segment)
            segment = None
        if segment is None:
            segment = self._open[launch.stream] = _Open(launch.stream)
        self._put(launch, segment, targets)

    def close_all(self) -> None:
        for segment in list(self._open.values()):
            self._close(segment)

    def _add_alone(self, launch: Launch) -> None:
        if (own := self._open.get(launch.stream)) is not None:
            self._close(own)
        for target in self._open_targets(launch):
            self._close(target)
        segment = self._open[launch.stream] = _Open(launch.stream)
        self._put(launch, segment, set())
        self._close(segment)

    def _put(self, launch: Launch, segment: _Open, targets: set[_Open]) -> None:
        segment.positions.append(launch.position)
        segment.after |= targets
        self._segment_of[launch.position] = segment

    def _open_targets(self, launch: Launch) -> set[_Open]:
        """Segments that are not launched yet and that the op waits for."""
        found = {self._segment_of[wait] for wait in launch.waits}
        return {segment for segment in found if not segment.closed}

    def _close(self, segment: _Open) -> None:
        if segment.closed:
            return
        segment.closed = True
        # By stream, so that the same round is cut in the same order every time.
        for before in sorted(segment.after, key=lambda found: found.stream):
            self._close(before)
        del self._open[segment.stream]
        self.closed.append(Segment(segment.stream, tuple(segment.positions), self._pays(segment)))

    def _pays(self, segment: _Open) -> bool:
        """A lone copy is one launch either way."""
        launches = [self._program.launches[position] for position in segment.positions]
        if not all(self._capturable[position] for position in segment.positions):
            return False
        return len(launches) > 1 or isinstance(launches[0].op, Compute)


def _follows(segment: _Open, earlier: _Open) -> bool:
    """Whether `segment` has to be launched after `earlier`."""
    before = [found for found in segment.after if not found.closed]
    return earlier in before or any(_follows(found, earlier) for found in before)
