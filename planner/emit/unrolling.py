"""Write out all rounds of a step from a schedule of four: the middle rounds repeat, op by op.

A step of 100 rounds is planned as one of four (first, two middle ones, last). Middle rounds have
the same residencies at the same offsets, so each issues the ops of the middle round before it: on
the same slots, with the versions that one more round makes, waiting for the same ops of the same
round or of earlier ones. Only the end of the last middle round may differ, where ops for the last
round are issued. This module compares two middle rounds before it repeats one; that the waits
suffice is proven of the whole schedule, as of any other (`verify`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from twinstream.planner.emit.emission import Emitted
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.lifetimes.recomputes import with_recomputes
from twinstream.planner.lifetimes.rounds import SIMULATED_ROUNDS, Folding, Place, with_rounds
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.pack.placement import Placement
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import SeveralRanksError
from twinstream.schedule.ops import Communicate, Compute, Copy, Feed, Fetch, Op, Operand

_REPEATED = 2  # the round that further ones are like; the one before it is, too


def repeated(make: Callable[[Chain], Emitted], chain: Chain) -> RankSchedule:
    """Plan a few rounds, and repeat the middle ones for all rounds of the chain.

    Args:
        make: a plan of the same step with any number of rounds.
        chain: with all.

    Raises:
        InfeasiblePlan: as `make`, with the task of the chain that the one of few rounds stands for.
    """
    few = with_rounds(chain, SIMULATED_ROUNDS)
    if few is chain:
        return make(chain).schedule
    try:
        made = make(few)
    except InfeasiblePlan as error:
        raise error.at(_stands_for(error.shortage.task, few, chain)) from None
    whole = with_all_rounds(made, make, chain)
    assert whole is not None, "rules make a plan of any number of rounds, or refuse"
    return whole


def _stands_for(task_id: str, few: Chain, chain: Chain) -> str:
    """The first task of all rounds, or recompute, that one of few rounds is like."""
    place, first = _places(few), {p: name for name, p in reversed(_places(chain).items())}
    if task_id in place:
        return first[place[task_id]]
    one = next(made for made in few.recomputes if made.task.task_id == task_id)
    before, level = first[place[one.before]], one.task.label.level
    likes = (made.task for made in chain.recomputes if made.before == before)
    return next(task.task_id for task in likes if task.label.level == level)


def with_all_rounds(
    few: Emitted, make: Callable[[Chain], Emitted | None], chain: Chain
) -> RankSchedule | None:
    """Return a plan of a few rounds with all of them, made one by one if the few do not repeat.

    None where they do not fit.

    Args:
        few: the plan of the simulated rounds.
        make: the same plan with any number of rounds.
        chain: with all.
    """
    if few.schedule.workload == chain.workload:
        return few.schedule
    if (schedule := unrolled(few, chain)) is not None:
        return schedule
    more = make(with_rounds(chain, SIMULATED_ROUNDS + 1))
    if more is not None and more.schedule.workload != chain.workload:
        if (schedule := unrolled(more, chain)) is not None:
            return schedule
        more = make(chain)
    return None if more is None else more.schedule


def unrolled(few: Emitted, chain: Chain) -> RankSchedule | None:
    """Return the schedule of a chain of more rounds; None where the few do not repeat.

    Args:
        few: at least four rounds, of the same decisions; with five, what is loaded for the last
            round may differ from what is loaded for the others.
        chain: the same step with more rounds.
    """
    placement = few.placement
    shape = _Shape(few, Folding.of(placement.chain, placement.tasks).starts)
    if not shape.repeats():
        return None
    made_a_round = _versions_a_round(placement.units, placement.tasks, shape.starts)
    tasks = _with_like_recomputes(placement, chain)
    rounds = _Rounds(shape, placement.units, made_a_round, chain, tasks)
    return few.schedule.model_copy(
        update={
            "ops": tuple(rounds.ops()),
            "calls": {name: chain.calls[name] for name in few.schedule.calls},
            "workload": chain.workload,
            "model_flops": chain.model_flops,
        }
    )


def _with_like_recomputes(few: Placement, chain: Chain) -> list[Task]:
    """The tasks of all rounds, with recomputes as the few have them in rounds like theirs."""
    chosen = {task.task_id for task in few.tasks}
    place, place_among_all = _places(few.chain), _places(chain)
    levels = {
        place[made.before]: level
        for made in few.chain.recomputes
        if made.task.task_id in chosen and (level := made.task.label.level) is not None
    }
    by_group = {made.group: levels.get(place_among_all[made.before]) for made in chain.recomputes}
    return with_recomputes(
        chain, {group: level for group, level in by_group.items() if level is not None}
    )


def _places(chain: Chain) -> dict[str, Place]:
    """Where every task is, by its id."""
    folding = Folding.of(chain, chain.tasks)
    return {task.task_id: folding.place(i) for i, task in enumerate(chain.tasks)}


@dataclass(frozen=True)
class _Where:
    """An op by the round that it is issued in and its number there."""

    round: int
    number: int


class _Shape:
    """The ops of the few rounds, by round."""

    def __init__(self, few: Emitted, starts: Sequence[int]) -> None:
        self.starts = starts
        self.ops = few.schedule.ops
        self.positions = few.positions
        folding = Folding(tuple(starts))
        self._round_of = [folding.round_of(position) for position in few.positions]
        sizes = Counter(self._round_of)
        self.begins = [sum(sizes[r] for r in range(until)) for until in range(len(starts))]
        self._index = {op.op_id: i for i, op in enumerate(self.ops)}

    def where(self, op_id: str) -> _Where:
        index = self._index[op_id]
        round_ = self._round_of[index]
        return _Where(round_, index - self.begins[round_])

    def of_round(self, round_: int) -> range:
        """The ops that are issued in a round."""
        return range(self.begins[round_], self.begins[round_ + 1])

    def repeats(self) -> bool:
        """Whether two middle rounds issue the same ops, and it is clear what these wait for."""
        one, other = self.of_round(_REPEATED - 1), self.of_round(_REPEATED)
        if len(one) != len(other):
            return False
        if any(self._issued(i) != self._issued(j) for i, j in zip(one, other, strict=True)):
            return False
        for index, op in enumerate(self.ops):
            round_ = self._round_of[index]
            if round_ >= _REPEATED and any(self.where(wait).round == 0 for wait in op.waits):
                return False
            before = {self.where(wait).round for wait in op.waits_previous}
            if before and (round_ == _REPEATED or _REPEATED in before):
                return False
        return True

    def _issued(self, index: int) -> tuple[object, ...]:
        """What an op is, but for what changes from round to round."""
        op, position = self.ops[index], self.positions[index]
        offset = position - self.starts[self._round_of[index]]
        match op:
            case Compute():
                operands = [(o.name, o.tensor, o.mode, o.num_parts, o.slot) for o in op.operands]
                return offset, op.stream, op.call, operands
            case Copy():
                return offset, op.stream, op.tensor, op.source, op.destination, op.num_parts
            case Feed() | Fetch():
                return offset, op.stream, op.kind, op.tensor, op.slot
            case Communicate():
                raise SeveralRanksError(op.op_id)


@dataclass(frozen=True)
class _Rounds:
    """All rounds of the chain, each like one of the few.

    `made_a_round`: by leaf, how many versions one more round makes.
    """

    shape: _Shape
    units: UnitMap
    made_a_round: dict[str, int]
    chain: Chain
    tasks: Sequence[Task]

    def ops(self) -> Iterator[Op]:
        """In order, with their waits."""
        ids = self._ids
        for round_, begin in enumerate(self._begins[:-1]):
            like = self._like(round_)
            for number, index in enumerate(self.shape.of_round(like)):
                op = self.shape.ops[index]
                update = self._content(round_, index)
                update["op_id"] = ids[begin + number]
                update["waits"] = tuple(self._waited_for(w, round_ - like) for w in op.waits)
                update["waits_previous"] = tuple(
                    self._waited_for(wait, self._more if self._at_the_end(wait) else 0)
                    for wait in op.waits_previous
                )
                yield op.model_copy(update=update)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return Folding.of(self.chain, self.tasks).starts

    @property
    def _more(self) -> int:
        """Rounds that there are more."""
        return len(self._starts) - len(self.shape.starts)

    def _like(self, round_: int) -> int:
        """The round of the few that a round is like."""
        return max(min(round_, _REPEATED), round_ - self._more)

    @cached_property
    def _begins(self) -> list[int]:
        """Where the ops of each round begin, and how many there are in all."""
        begins = [0]
        for round_ in range(len(self._starts) - 1):
            begins.append(begins[-1] + len(self.shape.of_round(self._like(round_))))
        return begins

    def _task(self, round_: int, index: int) -> Task:
        """The task before or after which an op of the few is issued, in a round like its own."""
        offset = self.shape.positions[index] - self.shape.starts[self._like(round_)]
        return self.tasks[self._starts[round_] + offset]

    def _version(self, round_: int, op: Copy | Feed | Fetch) -> int:
        leaf = self.units.leaves(op.tensor, None)[0]
        return op.version + (round_ - self._like(round_)) * self.made_a_round.get(leaf, 0)

    @cached_property
    def _ids(self) -> list[str]:
        """The ids of all ops; copies of a tensor are counted."""
        ids: list[str] = []
        copies: Counter[str] = Counter()
        for round_ in range(len(self._starts) - 1):
            for index in self.shape.of_round(self._like(round_)):
                op = self.shape.ops[index]
                key = op.op_id.rpartition(".")[0]
                match op:
                    case Compute():
                        ids.append(self._task(round_, index).task_id)
                    case Copy():
                        ids.append(f"{key}.{copies[key]}")
                        copies[key] += 1
                    case Feed() | Fetch():
                        ids.append(f"{key}.{self._version(round_, op)}")
        return ids

    def _waited_for(self, op_id: str, later: int) -> str:
        """What stands for an op of the few, so many rounds later."""
        where = self.shape.where(op_id)
        return self._ids[self._begins[where.round + later] + where.number]

    def _at_the_end(self, op_id: str) -> bool:
        return self.shape.where(op_id).round > _REPEATED

    def _content(self, round_: int, index: int) -> dict[str, object]:
        """What an op of the few works on in a round like its own, but for the slots."""
        op = self.shape.ops[index]
        match op:
            case Compute():
                task = self._task(round_, index)
                operands = tuple(
                    Operand(**vars(wanted), slot=given.slot)
                    for wanted, given in zip(task.operands, op.operands, strict=True)
                )
                return {"task": task.task_id, "label": task.label, "operands": operands}
            case Feed():
                version = self._version(round_, op)
                return {"version": version, "index": self._indices[op.tensor, version]}
            case Copy() | Fetch():
                return {"version": self._version(round_, op)}
            case Communicate():
                raise SeveralRanksError(op.op_id)

    @cached_property
    def _indices(self) -> dict[tuple[str, int], int]:
        """The index of every input in its source."""
        return {(fed.tensor, fed.version): fed.index for fed in self.chain.inputs}


def _versions_a_round(
    units: UnitMap, tasks: Sequence[Task], starts: Sequence[int]
) -> dict[str, int]:
    """By leaf, how many versions a middle round makes; leaves that none uses are left out."""
    one, other, after = starts[_REPEATED - 1 : _REPEATED + 2]
    return {
        leaf: later.version - earlier.version
        for before, task in zip(tasks[one:other], tasks[other:after], strict=True)
        for earlier, later in zip(before.operands, task.operands, strict=True)
        for leaf in units.leaves(later.tensor, later.num_parts)
    }
