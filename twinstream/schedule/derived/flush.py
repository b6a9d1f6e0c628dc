"""The flush of a schedule whose passes begin with the updates of the pass before.

When such a run rests or ends, the last pass's gradients are still to be applied. A flush is a
schedule of one pass that does that and nothing else, in the same arenas: the updates in the order
and the slots of the schedule itself, the copies they need, and at the end whatever it takes for
every carried slot to hold its tensor again. It consumes the gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from twinstream.schedule.chain import Chain
from twinstream.schedule.derived.disk_copies import DiskCopies
from twinstream.schedule.derived.makers import with_makers
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Communicate, Compute, Copy, Feed, Fetch, Op, Stream, TaskOperand
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.proof.memory_cells import GARBAGE, MemoryCell, MemoryCells
from twinstream.schedule.tensors import DEVICE, Carried, Role, Tensor

_STATE: tuple[Role, ...] = ("parameter", "optimizer_state")

_BEGINNING = -1  # for the number of an op: what is there before the first

Content = tuple[int, int]  # leaf (its number), version


class FlushError(TwinstreamError):
    """What a schedule carries cannot be restored after the updates alone."""


def is_state(tensor: Tensor) -> bool:
    """Whether a carried tensor is a run's state, or only waits for an update."""
    return tensor.role in _STATE


def flush_chain(chain: Chain) -> Chain:
    """The updates that a chain begins with, as a chain of their own that consumes the gradients.

    Its model FLOPs are still those of the step, whose updates these are.
    """
    tensors = {tensor.tensor_id: tensor for tensor in chain.tensors}
    waiting = {name for name in chain.persistent if not is_state(tensors[name])}
    tasks = tuple(t for t in chain.tasks if any(_waits(o, tensors, waiting) for o in t.operands))
    used = {operand.tensor for task in tasks for operand in task.operands}
    return chain.model_copy(
        update={
            "tasks": tasks,
            "calls": {task.call: chain.calls[task.call] for task in tasks},
            "recomputes": (),
            "inputs": tuple(fed for fed in chain.inputs if fed.tensor in used),
            "outputs": (),
            "persistent": tuple(name for name in chain.persistent if name not in waiting),
            "consumed": tuple(name for name in chain.persistent if name in waiting),
            "round_starts": (0,),
        }
    )


def flush_of(schedule: RankSchedule) -> RankSchedule | None:
    """A schedule of one pass that makes the updates the next pass would begin with.

    It is run at rest in the arenas of the schedule, where these lie as a pass left them; None where
    no pass leaves any update to the next. What comes out is to be proven, as any schedule.

    Raises:
        FlushError: what is carried on the device cannot be put back there.
    """
    updates, state = _updates_and_state(schedule)
    if not updates:
        return None
    ops = _Flush(schedule, updates).ops(state)
    calls = {op.call for op in ops if isinstance(op, Compute)}
    return schedule.model_copy(
        update={
            "ops": tuple(
                op.model_copy(update={"waits_previous": ()})
                for op in derive_waits(ops, schedule.tensors, schedule.slots)
            ),
            "calls": {name: call for name, call in schedule.calls.items() if name in calls},
            "carried": state,
            "consumed": tuple(item for item in schedule.carried if item not in state),
            "bound": None,
        }
    )


def without_updates(schedule: RankSchedule) -> RankSchedule:
    """Return the pass that follows a flush: it begins with no update, and finds no gradients.

    Versions are as if there were none; waits are as before, and not to be relied on.
    """
    updates, state = _updates_and_state(schedule)
    if not updates:
        return schedule
    accesses = AccessMap(schedule.tensors, schedule.slots)
    made = {
        access.leaf
        for op in schedule.ops
        if op.op_id in updates
        for access in accesses.of(op)
        if access.mode == "update"
    }
    updated = {name for number, name in enumerate(accesses.leaves) if number in made}
    updated |= {t.parent for t in schedule.tensors if t.parent and t.tensor_id in updated}

    def version(tensor: str, now: int) -> int:
        return now - 1 if now and tensor in updated else now

    def calm(op: Op) -> Op:
        if not isinstance(op, Compute | Communicate):
            return op.model_copy(update={"version": version(op.tensor, op.version)})
        operands = [
            o.model_copy(update={"version": version(o.tensor, o.version)}) for o in op.operands
        ]
        return op.model_copy(update={"operands": tuple(operands)})

    left = {item.tensor for item in schedule.carried if item not in state}
    left |= {t.tensor_id for t in schedule.tensors if t.parent in left}
    ops = tuple(
        calm(op)
        for op in schedule.ops
        if op.op_id not in updates
        and not (isinstance(op, Copy) and op.version == 0 and op.tensor in left)
    )
    return schedule.model_copy(update={"ops": ops, "carried": state})


def _updates_and_state(schedule: RankSchedule) -> tuple[set[str], tuple[Carried, ...]]:
    """Ops that make the updates of the pass before, and what of the carried is state."""
    tensors = {tensor.tensor_id: tensor for tensor in schedule.tensors}
    roots = {item.tensor: tensors[item.tensor].parent or item.tensor for item in schedule.carried}
    waiting = {root for root in roots.values() if not is_state(tensors[root])}
    updates = {
        op.op_id
        for op in schedule.ops
        if isinstance(op, Compute) and any(_waits(o, tensors, waiting) for o in op.operands)
    }
    return updates, tuple(c for c in schedule.carried if roots[c.tensor] not in waiting)


def _waits(operand: TaskOperand, tensors: dict[str, Tensor], waiting: set[str]) -> bool:
    """Whether it is what the step before left for this one's updates."""
    root = tensors[operand.tensor].parent or operand.tensor
    return operand.mode == "read" and operand.version == 0 and root in waiting


@dataclass
class _Placed:
    """What lies where, op after op, and which op put it there, by number."""

    map: AccessMap
    memory: list[MemoryCells] = field(init=False)
    made_by: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = [MemoryCells() for _ in self.map.tiers]

    def carry(self, item: Carried) -> None:
        tier, ranges = self.map.ranges(item.tensor, item.slot, None)
        for start, end, leaf in ranges:
            self.memory[tier].replace(MemoryCell(start, end, leaf, 0, 0, _BEGINNING))

    def run(self, op: Op) -> None:
        """Note by which ops what it reads was made, and what it makes."""
        number, makers = len(self.made_by), set[int]()
        for access in self.map.of(op):
            memory = self.memory[access.tier]
            if access.mode in ("read", "update"):
                cell = memory.exactly(access.start, access.end)
                assert cell is not None, "a safe schedule finds what it reads"
                makers.add(cell.writer_index)
            if access.mode != "read":
                leaf = GARBAGE if access.mode == "scratch" else access.leaf
                version = access.version + (access.mode == "update")
                memory.replace(MemoryCell(access.start, access.end, leaf, version, 0, number))
        self.made_by.append(makers - {_BEGINNING})

    def holds(self, copy: Copy) -> bool:
        """Whether what it copies is at its destination already: nothing that is left out came."""
        tier, ranges = self.map.ranges(copy.tensor, copy.destination, copy.num_parts)
        cells = [(leaf, self.memory[tier].exactly(start, end)) for start, end, leaf in ranges]
        return all(
            cell is not None and (cell.leaf, cell.version) == (leaf, copy.version)
            for leaf, cell in cells
            if leaf != GARBAGE
        )

    def maker(self, leaf: str, slot: str, content: Content) -> int | None:
        """The op that put content there; None where it is not."""
        tier, ((start, end, _),) = self.map.ranges(leaf, slot, None)
        cell = self.memory[tier].exactly(start, end)
        if cell is None or (cell.leaf, cell.version) != content:
            return None
        return cell.writer_index


class _Flush:
    """The updates of a schedule, with the copies they need."""

    def __init__(self, schedule: RankSchedule, updates: set[str]) -> None:
        self._schedule, self._updates = schedule, updates
        self._map = AccessMap(schedule.tensors, schedule.slots)
        self._placed = _Placed(self._map)
        self._by_disk = DiskCopies(self._map, schedule.ops)
        self._final: dict[int, int] = {}  # by leaf that is updated
        self._slots: dict[int, dict[str, None]] = {}  # by leaf, where it may lie

    def ops(self, carried: Sequence[Carried]) -> tuple[Op, ...]:
        """In order, their waits not yet derived; every carried slot holds its tensor at the end."""
        for item in self._schedule.carried:
            self._placed.carry(item)
            self._may_lie(item.tensor, item.slot)
        found: list[Op] = []
        for op in self._candidates():
            if not (isinstance(op, Copy) and self._placed.holds(op)):
                found.append(op)
                self._placed.run(op)
        wanted = {number for number, op in enumerate(found) if op.op_id in self._updates}
        leaves = [(leaf, item.slot) for item in carried for leaf in self._leaves(item.tensor)]
        leaves.sort(key=lambda pair: self._map.slots[pair[1]].tier == DEVICE)  # host copies first
        for leaf, slot in leaves:
            maker = self._placed.maker(leaf, slot, self._content(leaf))
            if maker is None:
                for copy in self._by_disk.by_host(self._restored(leaf, slot)):
                    found.append(copy)
                    self._placed.run(copy)
                maker = len(found) - 1
            wanted.add(maker)
        kept = with_makers(wanted - {_BEGINNING}, self._placed.made_by)
        return tuple(op for number, op in enumerate(found) if number in kept)

    def _candidates(self) -> Iterator[Op]:
        """The updates, and all copies and feeds before the last of what they read and make."""
        touched: set[tuple[str, int]] = set()
        for op in self._schedule.ops:
            if op.op_id in self._updates:
                for access in self._map.of(op):
                    name, made = self._map.leaves[access.leaf], access.mode == "update"
                    touched |= {(name, access.version), (name, access.version + made)}
                    if made:
                        self._final[access.leaf] = access.version + 1
        left = len(self._updates)
        for op in self._schedule.ops:
            if op.op_id in self._updates:
                left -= 1
                yield op
            elif isinstance(op, Copy) and self._contents(op) <= touched:
                self._may_lie(op.tensor, op.source, op.num_parts)
                self._may_lie(op.tensor, op.destination, op.num_parts)
                yield op
            elif isinstance(op, Feed) and self._contents(op) <= touched:
                yield op
            if not left:
                return

    def _contents(self, op: Copy | Feed | Fetch) -> set[tuple[str, int]]:
        num_parts = op.num_parts if isinstance(op, Copy) else None
        return {(leaf, op.version) for leaf in self._leaves(op.tensor, num_parts)}

    def _leaves(self, tensor: str, num_parts: int | None = None) -> list[str]:
        parts = [part.tensor_id for part in self._map.parts_of(tensor)[:num_parts]]
        return parts or [tensor]

    def _may_lie(self, tensor: str, slot: str, num_parts: int | None = None) -> None:
        for _, _, leaf in self._map.ranges(tensor, slot, num_parts)[1]:
            self._slots.setdefault(leaf, {})[slot] = None

    def _content(self, leaf: str) -> Content:
        """What a leaf is in the end."""
        number = self._map.leaves.index(leaf)
        return number, self._final.get(number, 0)

    def _restored(self, leaf: str, slot: str) -> Copy:
        """A copy into a carried slot from the other memory."""
        number, version = content = self._content(leaf)
        tier = self._map.slots[slot].tier
        for source in self._slots.get(number, {}):
            away = self._map.slots[source].tier != tier
            if away and self._placed.maker(leaf, source, content) is not None:
                return Copy(
                    op_id=f"restore.{leaf}.{slot}",
                    stream=Stream(queue="h2d" if tier == DEVICE else "d2h"),
                    tensor=leaf, version=version, source=source, destination=slot,
                )  # fmt: skip
        raise FlushError(
            f"after the updates alone slot '{slot}' lacks '{leaf}', which is in no other memory "
            "then: plan with another policy, or with the optimizer after backward"
        )
