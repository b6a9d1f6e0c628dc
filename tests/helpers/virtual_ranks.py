"""One clock for all ranks: dispatch loops run in threads, and what meets ends together."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from twinstream.executor.backends.protocol import MeasuredPass
from twinstream.executor.program.compiled import Launch, Program, compile_program
from twinstream.executor.replay.dispatch import PassOptions, run_passes
from twinstream.schedule.cluster.projecting import Channel, RankPart, rank_part
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Communicate, Op
from twinstream.schedule.timeline import PassSpans

DurationNs = Callable[[int, Op], int]
"""Of a rank's op; of a Communicate op the same on all ranks that meet."""
LIMIT_S = 30
Moment = Future[int]
_Key = tuple[Channel, int, int]


def known(at_ns: int) -> Moment:
    moment: Moment = Future()
    moment.set_result(at_ns)
    return moment


class Meetings:
    """By channel, sequence and pass, who has begun and when it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[_Key, tuple[Moment, list[int]]] = {}

    def arrive(self, key: _Key, start_ns: int, duration_ns: int) -> Moment:
        with self._lock:
            end, starts = self._begun.setdefault(key, (Future(), []))
            starts.append(start_ns)
            if len(starts) == len(key[0].members):
                end.set_result(max(starts) + duration_ns)
        return end


class RankClock:
    """A `VirtualBackend` whose ops may end when others say.

    It asks for an end only where an op has to know it, so that a rank issues both sides of a ring
    before it waits for either.
    """

    def __init__(
        self, part: RankPart, program: Program, duration_ns: DurationNs, wait_ns: int,
        meetings: Meetings,
    ) -> None:  # fmt: skip
        self.waited_ns = 0
        self._part, self._duration_ns, self._wait_ns = part, duration_ns, wait_ns
        self._meetings = meetings
        self._last = program.last_compute()
        self._free: list[Moment] = [known(0) for _ in program.streams]
        self._before: list[Moment] = []
        self._spans: list[list[tuple[int, Moment]]] = []

    def begin_pass(self, number: int, *, timed: bool) -> None:
        self._spans.append([])

    def wait(self, launch: Launch, event: Moment) -> None:
        self._before.append(event)

    def launch(self, launch: Launch) -> None:
        before = [*self._before, self._free[launch.stream]]
        start_ns = max(moment.result(LIMIT_S) for moment in before)
        self._before = []
        op, number = launch.op, len(self._spans) - 1
        if op.waits or (op.waits_previous and number):
            start_ns += self._wait_ns
        taken_ns = self._duration_ns(self._part.rank, op)
        if isinstance(op, Communicate):
            key = self._part.channels[op.op_id], op.sequence, number
            end = self._meetings.arrive(key, start_ns, taken_ns)
        else:
            end = known(start_ns + taken_ns)
        self._free[launch.stream] = end
        self._spans[-1].append((start_ns, end))

    def record(self, launch: Launch) -> Moment:
        return self._free[launch.stream]

    def synchronize(self) -> None:
        return

    def finish(self) -> list[MeasuredPass]:
        found = []
        for spans in self._spans:
            starts = tuple(start for start, _ in spans)
            ends = tuple(end.result(LIMIT_S) for _, end in spans)
            found.append(MeasuredPass(ends[self._last], PassSpans(start_ns=starts, end_ns=ends)))
        return found

    def abort(self) -> None:
        return


def run_virtual_ranks(
    schedule: Schedule, duration_ns: DurationNs, wait_ns: int, num_passes: int
) -> dict[int, list[PassSpans]]:
    """The spans of every pass, by rank."""
    meetings = Meetings()

    def run(rank: int) -> list[PassSpans]:
        part = rank_part(schedule, rank)
        program = compile_program(part.schedule)
        clock = RankClock(part, program, duration_ns, wait_ns, meetings)
        passes = run_passes(program, clock, PassOptions(num_passes))
        return [found.spans for found in passes.times if found.spans is not None]

    ranks = range(schedule.mesh.size)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(run, ranks), strict=True))
