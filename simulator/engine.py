"""The event engine: all streams of all classes of ranks in one SimPy environment."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import simpy

from twinstream.hardware_profiles.errors import TooLongError
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.numbers import MOST_NS
from twinstream.simulator.flows import FluidPool, SharedFlow

_UNENDED = -1


class StuckError(TwinstreamError):
    """Ranks wait for one another for ever; `verify` says where."""


@dataclass(frozen=True, slots=True)
class OpPrice:
    """The time of an op: `fixed_ns` of latency, then a flow that shares resources, if any."""

    fixed_ns: int
    flow: SharedFlow | None


class StreamOp(NamedTuple):
    """An op on its stream, by positions in the schedule; the price of an exchange is with that."""

    position: int
    price: OpPrice | None
    exchange: int
    waits: tuple[int, ...]
    waits_previous: tuple[int, ...]


@dataclass(frozen=True)
class RankProgram:
    """The ops of a class of ranks by stream, and how long a wait for another stream takes."""

    streams: tuple[tuple[StreamOp, ...], ...]
    num_ops: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """An exchange: how many ops meet in it, and how long it then takes."""

    num_sides: int
    price: OpPrice


class PassTimes:
    """When the ops of one class began and ended in one pass (-1: not yet)."""

    __slots__ = ("ends", "starts", "waiters")

    def __init__(self, num_ops: int) -> None:
        self.starts = [0] * num_ops
        self.ends = [_UNENDED] * num_ops
        self.waiters: dict[int, list[_Stream]] = {}


@dataclass(slots=True, eq=False)
class _Stream:
    program: int
    ops: tuple[StreamOp, ...]
    at: int = 0
    number: int = 0


class Engine:
    """Runs the programs of all classes, with their exchanges, over a number of passes."""

    def __init__(
        self,
        programs: Sequence[RankProgram],
        rendezvous: Sequence[Rendezvous],
        capacity: Sequence[float],
        num_passes: int,
    ) -> None:
        self._env = simpy.Environment()
        self._programs, self._rendezvous = programs, rendezvous
        self._num_passes = num_passes
        self._pool = FluidPool(self._env, capacity)
        self._passes: list[list[PassTimes]] = []
        self._left: list[int] = []  # ops of all classes that have not ended, by pass
        self._arrived: dict[tuple[int, int], tuple[tuple[_Stream, ...], int]] = {}
        self._ready = deque(
            _Stream(number, ops)
            for number, program in enumerate(programs)
            for ops in program.streams
        )
        self._ended = 0
        self._drain()

    def next_pass(self) -> list[PassTimes]:
        """Run until the next pass is through, in every class.

        Raises:
            StuckError: it never is.
            TooLongError: it takes over 100 days.
        """
        env = self._env
        this = self._of(self._ended)
        number = self._ended
        while self._left[number]:
            try:
                env.step()
            except simpy.core.EmptySchedule:
                raise self._stuck(this) from None
            self._drain()
        if env.now > MOST_NS:
            raise TooLongError(
                f"a few passes take over {MOST_NS / 86_400e9:.0f} days on this machine: a number "
                "of its profile (a rate, an efficiency, a latency) or the step is a slip"
            )
        self._ended += 1
        return this

    def _stuck(self, this: list[PassTimes]) -> StuckError:
        left = [sum(end == _UNENDED for end in one.ends) for one in this]
        return StuckError(
            f"in pass {self._ended} ranks wait for one another for ever: "
            + ", ".join(f"{count} ops of class {i}" for i, count in enumerate(left) if count)
            + " never run"
        )

    def _of(self, number: int) -> list[PassTimes]:
        while len(self._passes) <= number:
            self._passes.append([PassTimes(program.num_ops) for program in self._programs])
            self._left.append(sum(program.num_ops for program in self._programs))
        return self._passes[number]

    def _drain(self) -> None:
        ready = self._ready
        while ready:
            self._advance(ready.popleft())

    def _advance(self, stream: _Stream) -> None:
        """Begin the stream's next op, or note what it waits for."""
        if stream.at == len(stream.ops):
            stream.at, stream.number = 0, stream.number + 1
        if stream.number == self._num_passes:
            return
        op, delay_ns = stream.ops[stream.at], 0
        this = self._of(stream.number)[stream.program]
        if op.waits or op.waits_previous:
            if self._must_wait(stream, op, this):
                return
            if op.waits or stream.number:
                delay_ns = self._programs[stream.program].wait_ns
        start_ns = int(self._env.now) + delay_ns
        this.starts[op.position] = start_ns
        if op.exchange < 0:
            assert op.price is not None
            self._begin(op.price, delay_ns, partial(self._end, (stream,)))
            return
        key = op.exchange, stream.number
        rendezvous = self._rendezvous[op.exchange]
        sides, latest_ns = self._arrived.pop(key, ((), 0))
        sides, latest_ns = (*sides, stream), max(latest_ns, start_ns)
        if len(sides) < rendezvous.num_sides:
            self._arrived[key] = sides, latest_ns
        else:
            delay_ns = latest_ns - int(self._env.now)
            self._begin(rendezvous.price, delay_ns, partial(self._end, sides))

    def _must_wait(self, stream: _Stream, op: StreamOp, this: PassTimes) -> bool:
        for position in op.waits:
            if this.ends[position] < 0:
                this.waiters.setdefault(position, []).append(stream)
                return True
        if stream.number:
            before = self._passes[stream.number - 1][stream.program]
            for position in op.waits_previous:
                if before.ends[position] < 0:
                    before.waiters.setdefault(position, []).append(stream)
                    return True
        return False

    def _begin(self, price: OpPrice, delay_ns: int, done: "partial[None]") -> None:
        """Begin an op's or exchange's time after a delay."""
        delay_ns += price.fixed_ns
        if (
            price.flow is None
        ):  # by way of the queue, so that chains of ops without time do not nest
            self._after(delay_ns, done)
        elif delay_ns:
            self._after(delay_ns, partial(self._flow, price.flow, done))
        else:
            self._pool.run(price.flow, done)

    def _after(self, delay_ns: int, then: Callable[[simpy.Event], None]) -> None:
        timer = self._env.timeout(delay_ns)
        assert timer.callbacks is not None
        timer.callbacks.append(then)

    def _flow(self, flow: SharedFlow, done: "partial[None]", _: simpy.Event) -> None:
        self._pool.run(flow, done)

    def _end(self, streams: tuple[_Stream, ...], _: simpy.Event | None = None) -> None:
        now_ns = int(self._env.now)
        for stream in streams:
            this = self._passes[stream.number][stream.program]
            position = stream.ops[stream.at].position
            this.ends[position] = now_ns
            self._left[stream.number] -= 1
            stream.at += 1
            self._ready.append(stream)
            if (waiting := this.waiters.pop(position, None)) is not None:
                self._ready.extend(waiting)
