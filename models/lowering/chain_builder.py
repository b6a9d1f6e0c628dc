"""Collects tensors, calls and tasks of a chain and keeps count of versions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from twinstream.models.kernel_costs.workspace import workspace_bytes
from twinstream.schedule.chain import COMMUNICATE, Input, Output, Recompute, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import (
    Attribute,
    KernelCall,
    Label,
    Mode,
    Phase,
    Processor,
    TaskOperand,
)
from twinstream.schedule.tensors import Role, Tensor, flat_shape

OperandT = TypeVar("OperandT")
UseMode = Literal["read", "write", "update"]


class CollectiveCall(NamedTuple):
    """What ranks that differ along some axes only say to one another, on a queue.

    Fields:
        shift: how much further along the axis the rank is that is sent to or heard.
        reduction: of a sum, in which order it is made.
        last_first: shards lie in the reverse of rank order.
    """

    collective: str
    axes: tuple[str, ...]
    queue: str
    shift: int = 0
    reduction: str | None = None
    last_first: bool = False

    @property
    def call_id(self) -> str:
        """The name of the call, of all tasks that say the same to the same ranks."""
        order = ("last_first",) if self.last_first else ()
        return ".".join((COMMUNICATE, self.queue, self.collective, *self.axes, *order))

    @property
    def call(self) -> KernelCall:
        """The call of tasks that become `Communicate` ops."""
        attributes: dict[str, Attribute] = {
            "collective": self.collective, "axes": " ".join(self.axes), "queue": self.queue,
        }  # fmt: skip
        if self.shift:
            attributes["shift"] = self.shift
        if self.reduction is not None:
            attributes["reduction"] = self.reduction
        if self.last_first:
            attributes["last_first"] = True
        return KernelCall(kernel=COMMUNICATE, attributes=attributes, cost=())


class TaskBuilder(ABC, Generic[OperandT]):
    """Tasks are added in chain order, exchanges with other ranks among them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.calls: dict[str, KernelCall] = {}
        self.tasks: list[Task] = []
        self._labels: dict[tuple[object, ...], Label] = {}

    def declare(self, tensor: Tensor) -> None:
        """Add a tensor."""
        self.tensors.append(tensor)

    def declare_flat(self, tensor_id: str, size_bytes: int, role: Role, dtype: str) -> None:
        """Add a flat tensor, whose inner layout is the kernels' business."""
        dtype, shape = flat_shape(size_bytes, dtype)
        self.declare(
            Tensor.made(
                tensor_id=tensor_id, size_bytes=size_bytes, role=role, dtype=dtype, shape=shape,
                parent=None, offset_bytes=0,
            )
        )  # fmt: skip

    @abstractmethod
    def add(self, task_id: str, call: str, operands: Sequence[OperandT], label: Label) -> None:
        """Add a task of a declared call."""

    def label(
        self, kind: str, layer: int | None = None, chunk: int | None = None,
        round_: int | None = None, phase: Phase | None = None,
    ) -> Label:  # fmt: skip
        """Return a task's label; those of one kind and place are one object."""
        key = kind, layer, chunk, round_, phase
        if key not in self._labels:
            self._labels[key] = Label(
                kind=kind, layer=layer, chunk=chunk, round=round_, phase=phase
            )
        return self._labels[key]

    def communicate(
        self, task_id: str, said: CollectiveCall, operands: Sequence[OperandT], label: Label
    ) -> None:
        """Add a task that is one side of an exchange."""
        call_id = said.call_id
        if call_id not in self.calls:
            self.calls[call_id] = said.call
        self.add(task_id, call_id, operands, label)

    def exchange(
        self, collective: Literal["send", "recv"], messages: Iterable[tuple[str, OperandT]],
        shift: int, round_: int,
    ) -> None:  # fmt: skip
        """Add messages to the stage next to this one, or from there, by what tells them apart."""
        queue = f"{collective}.{'next' if shift > 0 else 'prev'}"
        said = CollectiveCall(collective, ("pp",), queue, shift)
        for tag, operand in messages:
            label = self.label(collective, round_=round_)
            self.communicate(f"{collective}.{tag}", said, [operand], label)


class ChainBuilder(TaskBuilder[TaskOperand]):
    """Operands take their versions from the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputes: list[Recompute] = []
        self.inputs: list[Input] = []
        self.outputs: list[Output] = []
        self._unbound: list[tuple[str, Task]] = []
        self.sizes_bytes: dict[str, int] = {}
        self._latest: dict[str, int] = {}
        self._parts: dict[str, list[str]] = {}
        self._operands: dict[tuple[str, str, int, Mode, int | None], TaskOperand] = {}

    def declare(self, tensor: Tensor) -> None:
        super().declare(tensor)
        self._latest[tensor.tensor_id] = 0
        self.sizes_bytes[tensor.tensor_id] = tensor.size_bytes
        if tensor.parent is not None:
            self._parts.setdefault(tensor.parent, []).append(tensor.tensor_id)

    def call(
        self,
        call_id: str,
        kernel: str,
        attributes: dict[str, Attribute],
        cost: tuple[Work, ...],
        processor: Processor = "device",
    ) -> str:
        """Declare a kernel call, and the scratch tensor that its implementation needs."""
        if call_id not in self.calls:
            self.calls[call_id] = KernelCall(
                kernel=kernel, attributes=attributes, cost=cost, processor=processor
            )
            if size := workspace_bytes(kernel, attributes):
                self.declare_flat(f"scratch.{call_id}", size, "scratch", "uint8")
        return call_id

    def latest(self, tensor: str) -> int:
        """The newest version of a tensor without parts; 0 if nothing has made one."""
        return self._latest[tensor]

    def read(self, name: str, tensor: str, num_parts: int | None = None) -> TaskOperand:
        return self._existing(name, tensor, num_parts, "read")

    def write(self, name: str, tensor: str, num_parts: int | None = None) -> TaskOperand:
        leaves = self._leaves(tensor, num_parts)
        version = 1 + max(self._latest[leaf] for leaf in leaves)
        self._latest.update(dict.fromkeys(leaves, version))
        return self._operand(name, tensor, version, "write", num_parts)

    def update(self, name: str, tensor: str, num_parts: int | None = None) -> TaskOperand:
        found = self._existing(name, tensor, num_parts, "update")
        leaves = self._leaves(tensor, num_parts)
        self._latest.update(dict.fromkeys(leaves, found.version + 1))
        return found

    def operand(self, name: str, tensor: str, mode: UseMode) -> TaskOperand:
        """Return an operand of a whole tensor that is read, written or updated."""
        use = {"read": self.read, "write": self.write, "update": self.update}
        return use[mode](name, tensor)

    def outgoing(self, tensor: str) -> tuple[str, TaskOperand]:
        """Return the newest version as a message that is sent."""
        sent = self.read("hidden", tensor)
        return f"{tensor}.v{sent.version}", sent

    def incoming(self, tensor: str, version: int) -> tuple[str, TaskOperand]:
        """Return a version, made on another rank, as a message that is received."""
        self._latest.update(dict.fromkeys(self._leaves(tensor, None), version - 1))
        return f"{tensor}.v{version}", self.write("hidden", tensor)

    def accumulate(self, name: str, tensor: str) -> TaskOperand:
        """The step's first contribution is a write, later ones are updates."""
        fresh = all(self._latest[leaf] == 0 for leaf in self._leaves(tensor, None))
        return self.write(name, tensor) if fresh else self.update(name, tensor)

    def add(self, task_id: str, call: str, operands: Sequence[TaskOperand], label: Label) -> None:
        self.tasks.append(self._task(task_id, call, operands, label))

    def add_recompute(
        self, group: str, task_id: str, call: str, operands: Sequence[TaskOperand], label: Label
    ) -> None:
        """A recompute right before the task added next."""
        self._unbound.append((group, self._task(task_id, call, operands, label)))

    def bind_recomputes(self, before: str) -> None:
        """Tie the recomputes added since the last binding to the task that follows them."""
        self.recomputes += [
            Recompute(task=task, before=before, group=group) for group, task in self._unbound
        ]
        self._unbound.clear()

    def again(self, name: str, tensor: str) -> TaskOperand:
        """What a recompute makes: the version that exists already."""
        return self._existing(name, tensor, None, "write")

    def _existing(
        self,
        name: str,
        tensor: str,
        num_parts: int | None,
        mode: UseMode,
    ) -> TaskOperand:
        """An operand of the version there is."""
        versions = {self._latest[leaf] for leaf in self._leaves(tensor, num_parts)}
        assert len(versions) == 1, f"{tensor} is used while its parts differ: {versions}"
        return self._operand(name, tensor, versions.pop(), mode, num_parts)

    def _operand(
        self, name: str, tensor: str, version: int, mode: Mode, num_parts: int | None
    ) -> TaskOperand:
        """Many tasks have the same: it is made once."""
        key = name, tensor, version, mode, num_parts
        if key not in self._operands:
            self._operands[key] = TaskOperand(
                name=name, tensor=tensor, version=version, mode=mode, num_parts=num_parts
            )
        return self._operands[key]

    def _task(self, task_id: str, call: str, operands: Sequence[TaskOperand], label: Label) -> Task:
        scratch = f"scratch.{call}"
        if scratch in self._latest:
            operands = [
                *operands, TaskOperand(name="scratch", tensor=scratch, version=0, mode="scratch")
            ]  # fmt: skip
        return Task(task_id=task_id, call=call, operands=tuple(operands), label=label)

    def _leaves(self, tensor: str, num_parts: int | None) -> list[str]:
        parts = self._parts.get(tensor)
        return [tensor] if parts is None else parts[:num_parts]


def by_rank(axis: str, values: Mapping[str, Sequence[int]]) -> dict[str, Attribute]:
    """What a call is told that each rank of an axis has a value of its own of."""
    if len(next(iter(values.values()))) == 1:
        return {name: one for name, (one,) in values.items()}
    return {
        **{name: tuple(each) for name, each in values.items()},
        "by_rank": f"{axis} {' '.join(values)}",
    }
