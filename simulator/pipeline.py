"""Passes of a pipeline whose stages and microbatches are alike: what repeats is simulated once."""

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from twinstream.simulator.blocks import COMPUTE, IrregularError, StageMeeting, StageProgram
from twinstream.simulator.states import (
    AHEAD,
    ARRIVED,
    BEHIND,
    FAR,
    FRESH,
    MEETS,
    NEAR,
    WAITS,
    MessageState,
    StageState,
    StateChange,
    States,
    StreamState,
    SystemState,
)

_Side = tuple[int, int]  # a stage and its stream
_Uses = list[tuple[int, tuple[int, ...], tuple[int, ...]]]
_Messages = list[tuple[int, MessageState]]  # with the number of the meeting


@dataclass(eq=False, slots=True)
class _System:
    """Stages that messages join, or one alone; in a state since then."""

    stages: tuple[int, ...]
    meetings: tuple[int, ...]
    state: SystemState
    since_ns: int
    change: StateChange
    is_current: bool = True


@dataclass
class PassLog:
    """What op times follow from: changes with when they began, of which stages, at which blocks.

    `messages` has, of ops that met others', stage, block, stream, place, and when they had come,
    when all had, and when it was over.
    """

    changes: dict[int, tuple[StateChange, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]] = (
        field(default_factory=dict)
    )
    messages: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)

    def add(
        self, change: StateChange, since_ns: int, stages: tuple[int, ...], at: tuple[int, ...]
    ) -> None:
        """A change has come about, from then on."""
        found = self.changes.get(id(change))
        if found is None:
            found = self.changes[id(change)] = change, []
        found[1].append((since_ns, stages, at))


class _Stage:
    """Where the streams of a stage stand, by blocks from that of compute."""

    def __init__(self, states: States, program: StageProgram) -> None:
        self.program, self._states = program, states
        self._numbers = [states.interned.number(one) for one in program.blocks]
        self._views: dict[tuple[int, int], int] = {}
        count = len(program.blocks[0].streams)
        self._with_ops: list[list[int]] = [[] for _ in range(count)]
        for at, block in enumerate(program.blocks):
            for number, ops in enumerate(block.streams):
                if ops:
                    self._with_ops[number].append(at)
        self.base = 0
        self.pass_ends_ns: list[int] = []
        first = [one[0] if one else len(program.blocks) for one in self._with_ops]
        self.streams = [StreamState(at, 0, FRESH) for at in first]
        self.far: dict[int, int] = {}  # blocks of streams that are far ahead, or have no more ops
        for number, at in enumerate(first):
            if at > AHEAD or at == len(program.blocks):
                self.far[number] = at
                self.streams[number] = StreamState(AHEAD + 1, 0, FAR)

    @property
    def is_over(self) -> bool:
        return self.far.get(COMPUTE, 0) == len(self.program.blocks)

    def _next_block(self, stream: int, after: int) -> int:
        found = self._with_ops[stream]
        at = bisect_right(found, after)
        return found[at] if at < len(found) else len(self.program.blocks)

    def at(self, stream: int) -> tuple[int, int]:
        """Block and place of a stream's op."""
        one = self.streams[stream]
        if one.block > AHEAD:
            return self.far[stream], 0
        return self.base + one.block, one.place

    def take(self, streams: Sequence[StreamState], moved: int) -> None:
        """Stand where a run has left the streams."""
        far, base = self.far, self.base
        self.streams = list(streams)
        for number, one in enumerate(streams):
            if one.does == FAR and number not in far:
                far[number] = self._next_block(number, base + AHEAD)
                if number == COMPUTE and not self.is_over:
                    raise IrregularError
        self.base = base = base + moved
        for number, at in list(far.items()) if far and moved else ():
            if at - base <= AHEAD and at < len(self.program.blocks):
                del far[number]
                does = self.streams[number].does
                self.streams[number] = StreamState(at - base, 0, NEAR if does == FAR else does)

    def pass_message(self, stream: int) -> bool:
        """Go on behind an op that has met others; return whether the next has arrived, too."""
        at, place = self.at(stream)
        blocks = self.program.blocks
        place += 1
        if place == len(blocks[at].streams[stream]):
            at, place = self._next_block(stream, at), 0
        self.far.pop(stream, None)
        if at - self.base > AHEAD or at == len(blocks):
            self.far[stream] = at
            self.streams[stream] = StreamState(AHEAD + 1, 0, FAR)
        else:
            self.streams[stream] = StreamState(at - self.base, place, WAITS)
        return self.look(stream)

    def look(self, stream: int) -> bool:
        """Whether a stream's op can come to its meeting by now, though far ahead of compute."""
        at, place = self.at(stream)
        if at == len(self.program.blocks):
            return False
        for ahead, other, where in self.program.blocks[at].streams[stream][place].waits:
            if (at + ahead, where) >= self.at(other):
                return False
        self.streams[stream] = StreamState(self.streams[stream].block, place, ARRIVED)
        return True

    def meet(self, stream: int) -> None:
        """The op's message begins."""
        one = self.streams[stream]
        self.streams[stream] = StreamState(one.block, one.place, MEETS)

    @property
    def state(self) -> StageState:
        lowest = min([one.block for one in self.streams])
        key = self.base, min(lowest, 0)
        if key not in self._views:
            if lowest < -BEHIND:
                raise IrregularError
            base, count = self.base, len(self._numbers)
            near = range(max(0, base + key[1]), count)
            around = range(base - BEHIND, base + AHEAD + 1)
            view = tuple([self._numbers[at] if at in near else -1 for at in around])
            self._views[key] = self._states.blocks_around(view)
        return self._views[key], tuple(self.streams)


class PipelineRun:
    """All stages through all passes."""

    def __init__(
        self, states: States, programs: Sequence[StageProgram], meetings: Sequence[StageMeeting]
    ) -> None:
        self._states, self._meetings = states, meetings
        self._stages = [_Stage(states, one) for one in programs]
        self._prices = [states.interned.number(one.price) for one in meetings]
        self._come: list[dict[int, tuple[int, bool]]] = [{} for _ in meetings]
        self._met_ns: list[tuple[dict[int, int], int]] = [({}, 0) for _ in meetings]
        self._system_of: dict[int, _System] = {}
        self._queue: list[tuple[int, int, _System]] = []
        self._count = 0
        self.log = PassLog()

    def pass_ends_ns(self) -> list[int]:
        """Return when compute was through with every pass, of all stages.

        Raises:
            IrregularError: something goes on that blocks do not show.
        """
        early = []
        for number, stage in enumerate(self._stages):
            early += [
                (number, one) for one in stage.program.meets if one in stage.far and stage.look(one)
            ]
            self._settle_alone(0, number)
        self._arrive_early(0, early)
        left = len(self._stages)
        while left:
            if not self._queue:
                raise IrregularError
            now_ns, _, system = heapq.heappop(self._queue)
            if system.is_current:
                left -= self._apply(now_ns, system)
        return [max(ends) for ends in zip(*(one.pass_ends_ns for one in self._stages), strict=True)]

    def _settle_alone(self, now_ns: int, stage: int) -> None:
        """Make a system of one stage."""
        self._enter(now_ns, (stage,), (), ((self._stages[stage].state,), ()))

    def _enter(
        self, now_ns: int, stages: tuple[int, ...], meetings: tuple[int, ...], state: SystemState
    ) -> None:
        change = self._states.next(state)
        system = _System(stages, meetings, state, now_ns, change)
        for stage in stages:
            if (before := self._system_of.get(stage)) is not None:
                before.is_current = False
            self._system_of[stage] = system
        if change.goes_on:
            self._count += 1
            heapq.heappush(self._queue, (now_ns + change.after_ns, self._count, system))

    def _settle(self, now_ns: int, stages: Iterable[int], messages: _Messages) -> None:
        """Make systems of stages and of the messages among them."""
        if not messages:
            for stage in stages:
                self._settle_alone(now_ns, stage)
            return
        groups: dict[int, set[int]] = {}
        for meeting, _ in messages:
            joined: set[int] = set()
            for stage, _ in self._meetings[meeting].sides:
                joined |= groups.get(stage, {stage})
            groups |= dict.fromkeys(joined, joined)
        for stage in stages:
            if stage not in groups:
                self._settle_alone(now_ns, stage)
        for group in {id(one): one for one in groups.values()}.values():
            members = tuple(sorted(group))
            place = {stage: number for number, stage in enumerate(members)}
            own = sorted([one for one in messages if self._meetings[one[0]].sides[0][0] in group])
            told = tuple(
                one._replace(
                    sides=tuple([(place[stage], q) for stage, q in self._meetings[m].sides])
                )
                for m, one in own
            )
            state = tuple([self._stages[stage].state for stage in members]), told
            self._enter(now_ns, members, tuple([m for m, _ in own]), state)

    def _take(self, system: _System, change: StateChange) -> None:
        """Bring the stages of a system to where a change ends."""
        at = tuple([self._stages[stage].base for stage in system.stages])
        self.log.add(change, system.since_ns, system.stages, at)
        for stage, streams, moved in zip(system.stages, change.streams, change.moved, strict=True):
            self._stages[stage].take(streams, moved)

    def _apply(self, now_ns: int, system: _System) -> int:
        """Follow a change's events; return how many stages are through with all passes."""
        change, stages = system.change, system.stages
        self._take(system, change)
        through = 0
        for member in change.over:
            self._stages[stages[member]].pass_ends_ns.append(now_ns)
            through += self._stages[stages[member]].is_over
        left: _Messages = []
        early: list[_Side] = []
        for number, one in enumerate(zip(system.meetings, change.messages, strict=True)):
            if number in change.ended:
                early += self._end_message(now_ns, one[0])
            else:
                left.append(one)
        self._settle(now_ns, stages, left)
        for member, stream, start_ns, late in change.arrivals:
            self._arrive(now_ns, (stages[member], stream), system.since_ns + start_ns, late=late)
        self._arrive_early(now_ns, early)
        return through

    def _end_message(self, now_ns: int, meeting: int) -> list[_Side]:
        """Go on behind it; return sides whose next op has arrived, too."""
        came_ns, begun_ns = self._met_ns[meeting]
        early = []
        for stage, stream in self._meetings[meeting].sides:
            at, place = self._stages[stage].at(stream)
            self.log.messages.append((stage, at, stream, place, came_ns[stage], begun_ns, now_ns))
            if self._stages[stage].pass_message(stream):
                early.append((stage, stream))
        return early

    def _arrive_early(self, now_ns: int, sides: Sequence[_Side]) -> None:
        for stage, stream in sides:
            own = self._stages[stage]
            at, place = own.at(stream)
            delay_ns = own.program.blocks[at].streams[stream][place].delay_ns
            self._arrive(now_ns, (stage, stream), now_ns + delay_ns, late=False)

    def _arrive(self, now_ns: int, side: _Side, start_ns: int, *, late: bool) -> None:
        """One side has come; with the last one the message begins."""
        meeting = self._stages[side[0]].program.meets[side[1]]
        come, sides = self._come[meeting], self._meetings[meeting].sides
        come[side[0]] = start_ns, late
        if len(come) < len(sides):
            return
        self._come[meeting] = {}
        begin_ns, is_late = max(come.values())
        if is_late:
            raise IrregularError
        self._met_ns[meeting] = {stage: ns for stage, (ns, _) in come.items()}, begin_ns
        systems = {id(self._system_of[one]): self._system_of[one] for one, _ in sides}.values()
        messages: _Messages = []
        for system in systems:
            messages += self._brought(now_ns, system)
        for stage, stream in sides:
            self._stages[stage].meet(stream)
        until_ns = begin_ns + self._meetings[meeting].price.fixed_ns - now_ns
        messages.append((meeting, MessageState((), self._prices[meeting], False, until_ns)))
        self._settle(now_ns, [stage for one in systems for stage in one.stages], messages)

    def _brought(self, now_ns: int, system: _System) -> _Messages:
        """Bring a system to now, before its next event; return its messages."""
        after_ns, messages = now_ns - system.since_ns, system.state[1]
        if after_ns:
            change = self._states.later(system.state, after_ns)
            self._take(system, change)
            messages = change.messages
        return list(zip(system.meetings, messages, strict=True))
