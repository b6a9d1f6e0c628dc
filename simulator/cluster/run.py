"""All streams of all classes of ranks in one SimPy environment."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import simpy

from twinstream.hardware_profiles.errors import TooLongError
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.numbers import MOST_NS
from twinstream.simulator.cluster.pool import ClusterPool, SharedFlow

_UNENDED = -1


class StuckError(TwinstreamError):
    """Ranks wait for one another for ever; `verify_cluster` says where."""


@dataclass(frozen=True, slots=True)
class Price:
    """`fixed_ns` of latency that nothing shares, then a flow (None: nothing but the latency)."""

    fixed_ns: int
    flow: SharedFlow | None


@dataclass(frozen=True, slots=True)
class Step:
    """An op as its stream sees it. Of an exchange the price is the exchange's."""

    position: int
    price: Price | None
    exchange: int
    waits: tuple[int, ...]
    waits_previous: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A class of ranks: its streams, and what a wait for another stream takes."""

    streams: tuple[tuple[Step, ...], ...]
    num_ops: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """An exchange: how many ops meet in it, and what it then takes."""

    num_sides: int
    price: Price


class ClassPass:
    """One pass of one class: when its ops began and ended (-1: not yet)."""

    __slots__ = ("ends", "left", "starts", "waiters")

    def __init__(self, num_ops: int) -> None:
        self.starts = [0] * num_ops
        self.ends = [_UNENDED] * num_ops
        self.waiters: dict[int, list[_Stream]] = {}
        self.left = num_ops


@dataclass(slots=True, eq=False)
class _Stream:
    program: int
    steps: tuple[Step, ...]
    at: int = 0
    number: int = 0
    waited: bool = False


class ClusterRun:
    """Programs with their exchanges, over a number of passes."""

    def __init__(
        self,
        programs: Sequence[Program],
        meetings: Sequence[Meeting],
        capacity: Sequence[float],
        num_passes: int,
    ) -> None:
        self._env = simpy.Environment()
        self._programs, self._meetings = programs, meetings
        self._num_passes = num_passes
        self._pool = ClusterPool(self._env, capacity)
        self._passes: list[list[ClassPass]] = []
        self._arrived: dict[tuple[int, int], list[_Stream]] = {}
        self._ready = deque(
            _Stream(number, steps)
            for number, program in enumerate(programs)
            for steps in program.streams
        )
        self._ended = 0
        self._drain()

    def next_pass(self) -> list[ClassPass]:
        """Run until the next pass is through, in every class.

        Raises:
            StuckError: it never is.
            TooLongError: it takes over 100 days.
        """
        env = self._env
        this = self._of(self._ended)
        while any(one.left for one in this):
            if env.peek() == float("inf"):
                raise StuckError(
                    f"in pass {self._ended} ranks wait for one another for ever: "
                    + ", ".join(
                        f"{one.left} ops of class {i}" for i, one in enumerate(this) if one.left
                    )
                    + " never run"
                )
            env.step()
            self._drain()
        if env.now > MOST_NS:
            raise TooLongError(f"a few passes take over {MOST_NS / 86_400e9:.0f} days")
        self._ended += 1
        return this

    def _of(self, number: int) -> list[ClassPass]:
        while len(self._passes) <= number:
            self._passes.append([ClassPass(program.num_ops) for program in self._programs])
        return self._passes[number]

    def _drain(self) -> None:
        ready = self._ready
        while ready:
            self._advance(ready.popleft())

    def _advance(self, stream: _Stream) -> None:
        """Begin the stream's next op, or note what it waits for."""
        if stream.at == len(stream.steps):
            stream.at, stream.number = 0, stream.number + 1
        if stream.number == self._num_passes:
            return
        step = stream.steps[stream.at]
        if not stream.waited and (step.waits or step.waits_previous):
            if self._must_wait(stream, step):
                return
            wait_ns = self._programs[stream.program].wait_ns
            if wait_ns and (step.waits or stream.number):
                stream.waited = True
                self._after(wait_ns, partial(self._ready.append, stream))
                return
        stream.waited = False
        this = self._of(stream.number)[stream.program]
        this.starts[step.position] = int(self._env.now)
        if step.exchange < 0:
            assert step.price is not None
            self._begin(step.price, partial(self._end, (stream,)))
            return
        key = step.exchange, stream.number
        meeting = self._meetings[step.exchange]
        sides = self._arrived.setdefault(key, [])
        sides.append(stream)
        if len(sides) == meeting.num_sides:
            del self._arrived[key]
            self._begin(meeting.price, partial(self._end, tuple(sides)))

    def _must_wait(self, stream: _Stream, step: Step) -> bool:
        this = self._of(stream.number)[stream.program]
        for position in step.waits:
            if this.ends[position] < 0:
                this.waiters.setdefault(position, []).append(stream)
                return True
        if stream.number:
            before = self._passes[stream.number - 1][stream.program]
            for position in step.waits_previous:
                if before.ends[position] < 0:
                    before.waiters.setdefault(position, []).append(stream)
                    return True
        return False

    def _begin(self, price: Price, done: "partial[None]") -> None:
        if price.fixed_ns and price.flow is not None:
            self._after(price.fixed_ns, partial(self._pool.run, price.flow, done))
        elif price.flow is not None:
            self._pool.run(price.flow, done)
        else:  # by way of the queue, so that chains of ops without time do not nest
            self._after(price.fixed_ns, done)

    def _after(self, delay_ns: int, then: "partial[None]") -> None:
        timer = self._env.timeout(delay_ns)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda event: then())

    def _end(self, streams: tuple[_Stream, ...]) -> None:
        now_ns = int(self._env.now)
        for stream in streams:
            this = self._passes[stream.number][stream.program]
            position = stream.steps[stream.at].position
            this.ends[position] = now_ns
            this.left -= 1
            stream.at += 1
            self._ready.append(stream)
            if (waiting := this.waiters.pop(position, None)) is not None:
                self._ready.extend(waiting)
