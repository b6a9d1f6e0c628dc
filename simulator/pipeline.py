"""Passes of a pipeline whose stages and microbatches are alike: what repeats is simulated once."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from twinstream.simulator.blocks import IrregularError, StageMeeting, StageProgram
from twinstream.simulator.pipeline_stage import PipelineStage
from twinstream.simulator.states import MessageState, StateChange, States, SystemState

_Side = tuple[int, int]  # a stage and its stream
_Messages = list[tuple[int, MessageState]]  # with the number of the meeting
_BY_TIME = itemgetter(0, 1)


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

    changes: list[tuple[StateChange, int, tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=list
    )
    messages: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)

    @property
    def lengths(self) -> tuple[int, int]:
        """How many changes and messages there are by now."""
        return len(self.changes), len(self.messages)

    def repeat(
        self, since: tuple[int, int], times: int, period_ns: int, blocks: Sequence[int]
    ) -> None:
        """What was added since then comes about so many times again, each so much later."""
        changes, messages = (self.changes[since[0] :], self.messages[since[1] :])
        for number in range(1, times + 1):
            on_ns, on = number * period_ns, [number * count for count in blocks]
            for change, since_ns, stages, at in changes:
                later = tuple([block + on[one] for one, block in zip(stages, at, strict=True)])
                self.changes.append((change, since_ns + on_ns, stages, later))
            self.messages += [
                (stage, at + on[stage], stream, place, came + on_ns, begun + on_ns, over + on_ns)
                for stage, at, stream, place, came, begun, over in messages
            ]


@dataclass(frozen=True)
class Repetition:
    """All stages went on as they had before, from a state to the same one.

    Fields:
        blocks: that each stage went on.
        period_ns: in which it did.
        begins: the block of each stage at which the first repetition begins.
    """

    blocks: tuple[int, ...]
    period_ns: int
    begins: tuple[int, ...]


class _Moment(NamedTuple):
    """When and where all stages stood, and what was logged by then."""

    at_ns: int
    bases: tuple[int, ...]
    far: tuple[dict[int, int], ...]
    come: list[dict[int, tuple[int, bool]]]
    logged: tuple[int, int]


class PipelineRun:
    """All stages through all passes."""

    def __init__(
        self, states: States, programs: Sequence[StageProgram], meetings: Sequence[StageMeeting]
    ) -> None:
        self._states, self._meetings = states, meetings
        self._stages = [PipelineStage(states, one) for one in programs]
        self._prices = [states.interned.number(one.price) for one in meetings]
        self._come: list[dict[int, tuple[int, bool]]] = [{} for _ in meetings]
        self._met_ns: list[tuple[dict[int, int], int]] = [({}, 0) for _ in meetings]
        self._system_of: dict[int, _System] = {}
        self._queue: list[tuple[int, int, _System]] = []
        self._count = 0
        self._moments: dict[Any, _Moment] = {}
        self._moments_of = 0  # the pass that they are of
        self.log = PassLog()
        self.repetition: Repetition | None = None  # of the last pass

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
                base = self._stages[0].base
                left -= self._apply(now_ns, system)
                if self._stages[0].base != base:
                    self._repeat(now_ns)
        return [max(ends) for ends in zip(*(one.pass_ends_ns for one in self._stages), strict=True)]

    def _repeat(self, now_ns: int) -> None:
        """Where all stages stand as they stood before, go on as they did from then."""
        num_passes = len(self._stages[0].pass_ends_ns)
        if num_passes != self._moments_of:
            self._moments, self._moments_of, self.repetition = {}, num_passes, None
        stands = self._stands(now_ns)
        bases, far = zip(*[(one.base, dict(one.far)) for one in self._stages], strict=True)
        now = _Moment(now_ns, bases, far, [dict(one) for one in self._come], self.log.lengths)
        before = self._moments.get(stands)
        self._moments[stands] = now
        if before is None:
            return
        period_ns = now_ns - before.at_ns
        blocks = tuple([b - a for a, b in zip(before.bases, now.bases, strict=True)])
        on_ns = {
            ns - then[side][0]
            for come, then in zip(self._come, before.come, strict=True)
            for side, (ns, _) in come.items()
        }
        times = 0
        if min(blocks) > 0 and on_ns <= {0, period_ns}:  # who has come long ago waits further on
            times = min(map(PipelineStage.times_again, self._stages, blocks, before.far))
        if times > 0:
            if num_passes:
                self.log.repeat(before.logged, times, period_ns, blocks)
            for one, on, then in zip(self._stages, blocks, before.far, strict=True):
                one.go_on(times * on, then)
            self._delay(times * period_ns)
            for came, was in zip(self._come, before.come, strict=True):
                for side, (ns, late) in came.items():
                    came[side] = ns + times * (ns - was[side][0]), late
            self._moments.clear()
            self.repetition = Repetition(blocks, period_ns, bases)

    def _stands(self, now_ns: int) -> tuple[Any, ...]:
        """How all stages stand, but for where and when."""
        events = [(at_ns - now_ns, one) for at_ns, _, one in sorted(self._queue, key=_BY_TIME)]
        left = {id(one): one for one in self._system_of.values()}
        systems = [(ns, left.pop(id(one))) for ns, one in events if one.is_current]
        systems += [(-1, one) for one in left.values()]
        met = [self._met_ns[meeting] for _, one in systems for meeting in one.meetings]
        met_ns = [(begun_ns, *came.values()) for came, begun_ns in met]
        return (
            *[(ns, one.since_ns - now_ns, id(one.change), one.stages) for ns, one in systems],
            *[tuple([ns - now_ns for ns in one]) for one in met_ns],
            *[tuple([(side, late) for side, (_, late) in come.items()]) for come in self._come],
        )  # fmt: skip

    def _delay(self, by_ns: int) -> None:
        """Everything that is under way is so much later."""
        self._queue = [(at_ns + by_ns, count, one) for at_ns, count, one in self._queue]
        for system in {id(one): one for one in self._system_of.values()}.values():
            system.since_ns += by_ns
        self._met_ns = [
            ({side: ns + by_ns for side, ns in came.items()}, begun_ns + by_ns)
            for came, begun_ns in self._met_ns
        ]

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
        self.log.changes.append((change, system.since_ns, system.stages, at))
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
