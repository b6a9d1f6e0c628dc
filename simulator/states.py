"""What states of a few stages come to: run op by op once, and then known.

Between two messages a stage hangs on nothing outside it. Where its streams stand and what is left
of the ops in flight then says how it goes on, whenever and in whichever stage that comes up. While
a message is on its way its two stages are one such system.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from twinstream.simulator.blocks import COMPUTE, Block, BlockOp, Interned, IrregularError
from twinstream.simulator.engine import OpPrice
from twinstream.simulator.flows import FluidPool, KnownRates, RunningFlow, SharedFlow

AHEAD = 4  # blocks that a stream may be in front of compute and still is looked at
BEHIND = 6
_MOST_BLOCKS = 2  # that compute goes through before its state is looked up anew
WAITS, TIMER, FLOWS, ARRIVED, MEETS, FRESH, FAR, NEAR = range(8)
"""What a stream does: it waits; its op's latency or its flow runs; its op has arrived at a meeting,
or meets others; it has not been looked at; it is too far ahead for that, or was until now."""


class StreamState(NamedTuple):
    """A stream: its op is of a block so many on from that of compute; what is left of it."""

    block: int
    place: int
    does: int
    until_ns: int = 0
    left: float = 0.0
    rate: float = 0.0
    since_ns: int = 0


class MessageState(NamedTuple):
    """A message: its sides (stage among those of the system, stream), its price, what is left."""

    sides: tuple[tuple[int, int], ...]
    price: int
    flows: bool
    until_ns: int = 0
    left: float = 0.0
    rate: float = 0.0
    since_ns: int = 0


StageState = tuple[int, tuple[StreamState, ...]]  # which blocks are around it, and its streams
SystemState = tuple[tuple[StageState, ...], tuple[MessageState, ...]]


class Arrival(NamedTuple):
    """An op has come to its meeting; `late`: that was seen only now."""

    member: int
    stream: int
    start_ns: int
    late: bool


class OpTime(NamedTuple):
    """When an op began or ended: of a stage, so many blocks on, its number in the block."""

    member: int
    block: int
    number: int
    is_end: bool
    at_ns: int


class StateChange(NamedTuple):
    """What a state comes to.

    Fields:
        after_ns: at its next event, or the time that was asked for.
        goes_on: whether there is a next event; else nothing happens any more after that.
        ended: messages; `over`: stages whose compute is through with a step.
        moved: blocks that the compute of each stage has gone on.
        streams: of each stage as it stands then.
        times: of ops.
    """

    after_ns: int
    goes_on: bool
    arrivals: tuple[Arrival, ...]
    ended: tuple[int, ...]
    over: tuple[int, ...]
    moved: tuple[int, ...]
    streams: tuple[tuple[StreamState, ...], ...]
    messages: tuple[MessageState, ...]
    times: tuple[OpTime, ...]


@dataclass
class States:
    """What is known of states, over all pipelines that it is used for.

    Fields:
        released: what may release the ops of blocks (`pipeline_idle.BlockReleases`).
    """

    interned: Interned
    around: list[tuple[Block | None, ...]] = field(default_factory=list)
    rates: KnownRates = field(default_factory=dict)
    released: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    _around_at: dict[tuple[int, ...], int] = field(default_factory=dict)
    _flows: dict[tuple[int, tuple[int, ...]], SharedFlow] = field(default_factory=dict)
    _next: dict[SystemState, StateChange] = field(default_factory=dict)
    _later: dict[tuple[SystemState, int], StateChange] = field(default_factory=dict)

    def blocks_around(self, numbers: tuple[int, ...]) -> int:
        """The number of a view of blocks, from `BEHIND` that of compute to `AHEAD`; -1: none."""
        if numbers not in self._around_at:
            self._around_at[numbers] = len(self.around)
            blocks = self.interned.blocks
            self.around.append(tuple([None if one < 0 else blocks[one] for one in numbers]))
        return self._around_at[numbers]

    def next(self, state: SystemState) -> StateChange:
        """What it comes to at its next event."""
        found = self._next.get(state)
        if found is None:
            found = self._next[state] = _Run(self, state).to(None)
        return found

    def later(self, state: SystemState, after_ns: int) -> StateChange:
        """What it comes to after so long, before any event then."""
        change = self.next(state)
        if not change.goes_on and after_ns >= change.after_ns:
            return change
        found = self._later.get((state, after_ns))
        if found is None:
            found = self._later[state, after_ns] = _Run(self, state).to(after_ns)
        return found

    def flow(self, flow: SharedFlow, members: tuple[int, ...]) -> SharedFlow:
        """A flow on the resources of stages of a system."""
        key = id(flow), members
        if key not in self._flows:
            each, amounts = len(self.interned.capacity), dict[int, float]()
            for name, amount in flow.flow.amounts:
                side, resource = divmod(int(name), each)
                amounts[members[side] * each + resource] = amount
            self._flows[key] = SharedFlow(flow.alone_ns, amounts)
        return self._flows[key]


KnownStates = dict[tuple[float, ...], States]  # by the capacity of a stage's resources


class _Timer:
    __slots__ = ("callbacks", "value")

    def __init__(self, value: Any) -> None:
        self.callbacks: list[Callable[[Any], object]] = []
        self.value = value


class _Clock:
    """As much of a SimPy environment as a fluid pool needs."""

    def __init__(self) -> None:
        self.now = 0
        self._queue: list[tuple[int, int, _Timer]] = []
        self._count = 0

    def timeout(self, delay: int, value: Any = None) -> _Timer:
        timer = _Timer(value)
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, timer))
        return timer

    @property
    def next_ns(self) -> int | None:
        return self._queue[0][0] if self._queue else None

    def step(self) -> None:
        self.now, _, timer = heapq.heappop(self._queue)
        for then in timer.callbacks:
            then(timer)


@dataclass(eq=False, slots=True)
class _Stream:
    block: int
    place: int
    does: int
    until_ns: int
    running: RunningFlow | None = None


@dataclass(eq=False, slots=True)
class _Message:
    sides: tuple[tuple[int, int], ...]
    price: int
    until_ns: int
    running: RunningFlow | None = None


class _Run:
    """A state on its way, op by op."""

    def __init__(self, states: States, state: SystemState) -> None:
        self._states, (members, messages) = states, state
        self._clock = _Clock()
        capacity = states.interned.capacity * len(members)
        self._pool = FluidPool(self._clock, capacity, states.rates)
        self._around = [states.around[number] for number, _ in members]
        self._streams: list[list[_Stream]] = []
        self._messages: list[_Message] = []
        self._arrivals: list[Arrival] = []
        self._ended: list[int] = []
        self._over: list[int] = []
        self._times: list[OpTime] = []
        self._ready: list[tuple[int, int]] = []
        for number, told in enumerate(messages):
            message = _Message(told.sides, told.price, told.until_ns)
            self._messages.append(message)
            agreed, sides = states.interned.prices[told.price], tuple(m for m, _ in told.sides)
            self._resume(message, told, agreed, sides, partial(self._meet_ends, number))
        for member, (_, streams) in enumerate(members):
            self._streams.append(
                [_Stream(one.block, one.place, one.does, one.until_ns) for one in streams]
            )
            for number, one in enumerate(streams):
                if one.does in (TIMER, FLOWS):
                    price = self._op(member, number).price
                    assert price is not None
                    end = partial(self._end, member, number)
                    self._resume(self._streams[member][number], one, price, (member,), end)
                elif one.does in (WAITS, FRESH, NEAR):
                    self._ready.append((member, number))

    def _op(self, member: int, number: int) -> BlockOp:
        stream = self._streams[member][number]
        block = self._around[member][stream.block + BEHIND]
        assert block is not None
        return block.streams[number][stream.place]

    def _resume(
        self, held: _Stream | _Message, told: StreamState | MessageState, price: OpPrice,
        members: tuple[int, ...], end: Callable[[], None],
    ) -> None:  # fmt: skip
        if not told.rate:
            self._after(told.until_ns, held, price, members, end)
            return
        assert price.flow is not None
        flow = self._states.flow(price.flow, members)
        held.running = RunningFlow(flow, end, told.rate, told.left, told.since_ns)
        self._pool.resume(held.running)

    def _after(
        self, delay_ns: int, held: _Stream | _Message, price: OpPrice, members: tuple[int, ...],
        end: Callable[[], None],
    ) -> None:  # fmt: skip
        """Begin an op's flow after its latency, or end it then."""
        held.until_ns = self._clock.now + delay_ns

        def then(_: object = None) -> None:
            if price.flow is None:
                end()
                return
            held.running = self._pool.run(self._states.flow(price.flow, members), end)

        if delay_ns or price.flow is None:
            self._clock.timeout(delay_ns).callbacks.append(then)
        else:
            then()

    def _meet_ends(self, number: int) -> None:
        self._messages[number].running = None
        self._ended.append(number)

    def _note(self, member: int, number: int, at_ns: int, *, is_end: bool) -> None:
        stream = self._streams[member][number]
        block = self._around[member][stream.block + BEHIND]
        assert block is not None
        place = block.begins[number] + stream.place
        self._times.append(OpTime(member, stream.block, place, is_end, at_ns))

    def _end(self, member: int, number: int) -> None:
        self._note(member, number, self._clock.now, is_end=True)
        stream = self._streams[member][number]
        stream.running = None
        stream.place += 1
        stream.does = WAITS
        while True:
            block = self._around[member][stream.block + BEHIND] if stream.block <= AHEAD else None
            if block is None:
                stream.block, stream.place, stream.does = AHEAD + 1, 0, FAR
                break
            if stream.place < len(block.streams[number]):
                break
            if number == COMPUTE and block.ends_pass:
                self._over.append(member)
            stream.block, stream.place = stream.block + 1, 0
        for other, one in enumerate(self._streams[member]):
            if one.does == WAITS:
                self._ready.append((member, other))

    def _start(self, member: int, number: int) -> None:
        """Begin the op of a stream unless it has to wait."""
        streams = self._streams[member]
        stream = streams[number]
        was = stream.does
        if was not in (WAITS, FRESH, NEAR):
            return
        stream.does = WAITS
        op = self._op(member, number)
        for ahead, other, place in op.waits:
            at, block = streams[other], stream.block + ahead
            if block > at.block or (block == at.block and place >= at.place):
                return
        start_ns = self._clock.now + op.delay_ns
        self._note(member, number, start_ns, is_end=False)
        if op.price is None:
            stream.does = ARRIVED
            self._arrivals.append(Arrival(member, number, start_ns, was == NEAR))
            return
        if was == NEAR:
            raise IrregularError
        stream.does = TIMER
        end = partial(self._end, member, number)
        self._after(op.delay_ns + op.price.fixed_ns, stream, op.price, (member,), end)

    def to(self, until_ns: int | None) -> StateChange:
        """Run to the next event, or for so long."""
        clock, goes_on = self._clock, True
        while True:
            while self._ready:
                self._start(*self._ready.pop())
            next_ns = clock.next_ns
            if next_ns != clock.now and (self._arrivals or self._ended or self._over):
                break
            if until_ns is None:
                if next_ns is None:
                    goes_on = False
                    break
                if next_ns != clock.now and max(map(_moved, self._streams)) >= _MOST_BLOCKS:
                    break
            elif next_ns is None or next_ns >= until_ns:
                clock.now = until_ns
                break
            clock.step()
        return StateChange(
            clock.now, goes_on, tuple(self._arrivals), tuple(self._ended), tuple(self._over),
            tuple(map(_moved, self._streams)),
            tuple([self._told(streams) for streams in self._streams]),
            tuple([self._told_message(one) for one in self._messages]), tuple(self._times),
        )  # fmt: skip

    def _told(self, streams: Sequence[_Stream]) -> tuple[StreamState, ...]:
        now_ns, moved = self._clock.now, _moved(streams)
        found = []
        for one in streams:
            block = one.block if one.block > AHEAD else one.block - moved
            if one.running is not None:
                left, rate, since_ns = one.running.left, one.running.rate, one.running.since_ns
                told = StreamState(block, one.place, FLOWS, 0, left, rate, since_ns - now_ns)
            elif one.does == TIMER:
                told = StreamState(block, one.place, TIMER, one.until_ns - now_ns)
            else:
                told = StreamState(block, one.place, one.does)
            found.append(told)
        return tuple(found)

    def _told_message(self, one: _Message) -> MessageState:
        now_ns, running = self._clock.now, one.running
        if running is None:
            return MessageState(one.sides, one.price, False, one.until_ns - now_ns)
        told = running.left, running.rate, running.since_ns - now_ns
        return MessageState(one.sides, one.price, True, 0, *told)


def _moved(streams: Sequence[_Stream]) -> int:
    """Blocks that compute has gone on; at the end it stays where it was."""
    compute = streams[COMPUTE]
    return 0 if compute.does == FAR else compute.block
