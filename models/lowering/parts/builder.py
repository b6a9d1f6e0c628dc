"""Collects the chain of a class of ranks, in the order in which its tasks are issued."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.models.lowering.chain_builder import TaskBuilder
from twinstream.schedule.chain import SlotPools, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import KernelCall, Label, Mode, TaskOperand
from twinstream.schedule.tensors import Role


@dataclass(eq=False, slots=True)
class Buffer:
    """A tensor of a kind (or of none) and its newest version.

    `name` is another than the tensor's where that is in several slots at a time.
    """

    tensor: str
    name: str
    size_bytes: int
    kind: str = ""
    version: int = 0
    last_read: TaskOperand | None = None


Use = tuple[str, Buffer, Mode]
Ends = tuple[Buffer, Buffer, Buffer]  # what a chunk was given, its output's gradient, its input's


class StageBuilder(TaskBuilder[Use]):
    """Collects what a class of ranks does in a step: tensors, calls and tasks.

    What ranks exchange has a tensor of its own each time, with slots from a pool (`SlotPools`).
    Anything else is in a tensor of a kind, which has one content after the other: that which has
    been free longest is taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.persistent: list[str] = []
        self._pools: dict[str, tuple[str, int]] = {}
        self._several: dict[str, dict[str, str]] = {}
        self._free: dict[str, deque[Buffer]] = {}
        self._counts: dict[str, int] = {}

    @property
    def pools(self) -> SlotPools:
        """Slots of what is exchanged."""
        return SlotPools(self._pools, self._several)

    def persist(self, tensor: str, size_bytes: int, role: Role, dtype: str) -> Buffer:
        """A tensor carried from step to step."""
        self.persistent.append(tensor)
        return self._declare(tensor, size_bytes, role, dtype)

    def allocate(
        self, kind: str, size_bytes: int, role: Role, dtype: str, spare: int = 0
    ) -> Buffer:
        """A tensor of a kind, with what is in it now until it is given back by `free`.

        One that was given back is taken only if `spare` more were: what is in the last may still
        be on its way.
        """
        free = self._free.setdefault(kind, deque())
        if len(free) > spare:
            return free.popleft()
        held = self._declare(f"{kind}.{self._count(kind)}", size_bytes, role, dtype)
        held.kind = kind
        return held

    def free(self, held: Buffer) -> None:
        """What is in the tensor is not needed any more."""
        self._free[held.kind].append(held)

    def exchanged(
        self, pool: str, size_bytes: int, role: Role, dtype: str, tensor: str, spare: int = 0
    ) -> Buffer:
        """A tensor by the name that it has on other ranks, from its first use to its last in a
        slot of a pool; again by that name, it is in one more slot."""
        count = self._count(tensor)
        if not count:
            held = self._declare(tensor, size_bytes, role, dtype)
        else:
            held = Buffer(tensor, f"{tensor}#{count}", size_bytes)
        self._pools[held.name] = pool, spare
        return held

    def compute(
        self, task_id: str, call: str, works: tuple[Work, ...], uses: Sequence[Use], label: Label
    ) -> None:
        """Add a task of computation; those of one call do the same work.

        A kernel is named after the kind of its part; `cluster.` says that it is only priced.
        """
        if call not in self.calls:
            self.calls[call] = KernelCall(kernel=f"cluster.{label.kind}", attributes={}, cost=works)
        self.add(task_id, call, uses, label)

    def add(self, task_id: str, call: str, operands: Sequence[Use], label: Label) -> None:
        found, made = [], TaskOperand.made
        for name, held, mode in operands:
            version = held.version
            if mode == "write":
                version = held.version = version + 1
            elif mode == "update":
                held.version = version + 1
            if held.name is not held.tensor:
                self._several.setdefault(task_id, {})[name] = held.name
            last = held.last_read
            if mode == "read" and last and last.version == version and last.name == name:
                found.append(last)
                continue
            one = made(name=name, tensor=held.tensor, version=version, mode=mode, num_parts=None)
            found.append(one)
            if mode == "read":
                held.last_read = one
        self.tasks.append(Task.made(task_id=task_id, call=call, operands=tuple(found), label=label))

    def _declare(self, tensor: str, size_bytes: int, role: Role, dtype: str) -> Buffer:
        size_bytes = max(1, size_bytes)
        self.declare_flat(tensor, size_bytes, role, dtype)
        return Buffer(tensor, tensor, size_bytes)

    def _count(self, name: str) -> int:
        found = self._counts[name] = self._counts.get(name, -1) + 1
        return found
