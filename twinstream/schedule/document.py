"""The schedule of a training step: what every rank of a mesh does, again and again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.node import MeshDocument, Node, facts_html
from twinstream.schedule.numbers import Count, Finite, Index, PositiveCount, PositiveFlops, Size
from twinstream.schedule.ops import Communicate, Compute, Copy, KernelCall, Op
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import Carried, Slot, Tensor
from twinstream.schedule.workload import MachineRef, ModelRef, Workload


class Caps(Node):
    """Bytes the process may take of each memory; None is no limit, and of a disk that none is used.

    Not the arena's are, of the device cap, `device_reserve_bytes`, which context and libraries
    take, and `library_bytes`, which libraries allocate while a kernel runs.
    """

    device_bytes: Size | None = None
    host_bytes: Size | None = None
    device_reserve_bytes: Size = 0
    library_bytes: Size = 0
    disk_bytes: Size | None = None

    @property
    def outside_arena_bytes(self) -> int:
        """The device memory that is taken beside its arena."""
        return self.device_reserve_bytes + self.library_bytes

    def arena_bytes(self, tier_kind: str) -> int | None:
        """Return how large the tier's arena may be."""
        if tier_kind == "device":
            cap = self.device_bytes
            return None if cap is None else max(0, cap - self.outside_arena_bytes)
        return self.host_bytes if tier_kind == "host" else self.disk_bytes or 0

    def with_arenas(self, device_bytes: int | None, host_bytes: int | None) -> "Caps":
        """Caps whose arenas have these sizes."""
        device = None if device_bytes is None else max(0, device_bytes) + self.outside_arena_bytes
        host = None if host_bytes is None else max(0, host_bytes)
        return self.model_copy(update={"device_bytes": device, "host_bytes": host})


class StepBound(Node):
    """What no schedule of the same chain, machine and caps can beat, and what it hangs on.

    Prices are the seconds per step that one more unit saves: a GiB of a memory, a GB/s of a rate.
    `limits` name the resources without which the bound would be lower. `family_step_s` is the least
    bound over all admissible ways to cut the step into rounds and chunks, where that was asked.
    `fixed` is what was not left to the planner: schedules that have it otherwise may be faster.
    """

    step_s: Finite
    device_s_per_gib: Finite
    host_s_per_gib: Finite
    link_s_per_gb_per_s: dict[str, Finite]
    limits: tuple[str, ...]
    family_step_s: Finite | None = None
    fixed: tuple[str, ...] = ()


class UpdatePlan(Node):
    """How many of the groups that are trained the host CPU updates, where that was open.

    Beside it the steps of plans with all updates on the device, and all on the host, in seconds;
    None of one that is not possible.
    """

    groups: Count
    groups_on_host: Count
    device_step_s: Finite | None = None
    host_step_s: Finite | None = None


class RankSchedule(Node):
    """Where every tensor of a rank's step lives, when it moves, and what is recomputed.

    Semantics, the whole of them: ops of one stream run in order; an op starts when its stream
    predecessor and all its waits have completed. One pass is one training step; passes follow
    one another with no barrier but `waits_previous`. `carried` holds at every boundary.

    What is `consumed` is there before the pass, and after it nothing is known of it: such a
    schedule is run for one pass, in arenas where another has left it.
    """

    schema_version: Literal[1] = 1
    tensors: tuple[Tensor, ...]
    slots: tuple[Slot, ...]
    calls: dict[str, KernelCall]
    ops: tuple[Op, ...]
    carried: tuple[Carried, ...]
    caps: Caps
    workload: Workload
    model: ModelRef
    recipe: dict[str, JsonValue]
    model_flops: PositiveFlops
    machine: MachineRef
    policy: str
    bound: StepBound | None = None
    places: UpdatePlan | None = None
    consumed: tuple[Carried, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Schedule of {self.model.name} on {self.machine.name}, policy {self.policy}: "
            f"{len(self.ops):,} ops, {self.workload.tokens_per_step:,} tokens a step>"
        )

    __str__ = __repr__

    @property
    def only(self) -> Self:
        """Itself, where a `Schedule` of one device would do, too."""
        return self

    def records(self) -> list[dict[str, object]]:
        """A row for each op, in issue order; what an op of its kind lacks is left out."""
        sizes = {tensor.tensor_id: tensor.size_bytes for tensor in self.tensors}
        return [_record(op, sizes) for op in self.ops]

    def _repr_html_(self) -> str:
        work, caps, bound = self.workload, self.caps, self.bound
        queues = Counter(op.stream.queue for op in self.ops)
        facts = {
            "step": f"{work.tokens_per_step:,} tokens: {work.rounds_per_step:,} rounds of "
            f"{work.chunks_per_round:,} chunks of {work.chunk_tokens:,} tokens",
            "ops": ", ".join(f"{number:,} {queue}" for queue, number in queues.items()),
            "tensors, slots": f"{len(self.tensors):,}, {len(self.slots):,}",
            "caps": ", ".join(
                f"{'any' if size is None else gib(size)} of {memory} memory"
                for memory, size in (("device", caps.device_bytes), ("host", caps.host_bytes))
            )
            + ("" if caps.disk_bytes is None else f", {gib(caps.disk_bytes)} of a disk"),
            "bound of the step": "" if bound is None else f"{bound.step_s:.4g} s",
        }
        named = f"{self.model.name} on {self.machine.name}, policy {self.policy}"
        return facts_html(f"Schedule of {named}", facts)

    @model_validator(mode="after")
    def _ids_are_unique_and_known(self) -> Self:
        tensors = _unique("tensor", [t.tensor_id for t in self.tensors])
        slots = _unique("slot", [s.slot_id for s in self.slots])
        _unique("op", [op.op_id for op in self.ops])
        for tensor in self.tensors:
            if tensor.parent is not None and tensor.parent not in tensors:
                raise _unknown("tensor", tensor.tensor_id, "parent", tensor.parent)
        for item in (*self.carried, *self.consumed):
            _known(tensors, slots, "carried", item.tensor, item.slot)
        for op in self.ops:
            if isinstance(op, Compute | Communicate):
                if isinstance(op, Compute) and op.call not in self.calls:
                    raise _unknown("op", op.op_id, "call", op.call)
                for operand in op.operands:
                    _known(tensors, slots, op.op_id, operand.tensor, operand.slot)
            elif isinstance(op, Copy):
                _known(tensors, slots, op.op_id, op.tensor, op.source)
                _known(tensors, slots, op.op_id, op.tensor, op.destination)
            else:
                _known(tensors, slots, op.op_id, op.tensor, op.slot)
        return self


class Axis(Node):
    """One axis of a mesh, by its usual name: pp, dp, cp, ep, tp."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    size: PositiveCount


class Mesh(Node):
    """Ranks in rows: the last axis is the innermost, its ranks follow one another.

    Rank r is on node r // ranks_per_node.

    >>> mesh = Mesh(axes=(Axis(name="pp", size=2), Axis(name="tp", size=4)), ranks_per_node=4)
    >>> mesh.size, mesh.coordinates(6), mesh.stride("pp")
    (8, {'pp': 1, 'tp': 2}, 4)
    """

    axes: Annotated[tuple[Axis, ...], Field(min_length=1)]
    ranks_per_node: PositiveCount

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise PydanticCustomError("axis_twice", "two axes of a mesh have one name")
        return self

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def length(self, name: str) -> int:
        """Ranks along an axis; KeyError if there is none of that name."""
        return {axis.name: axis.size for axis in self.axes}[name]

    def stride(self, name: str) -> int:
        """Return how far apart, in ranks, two neighbours along an axis are."""
        place = self.names.index(name)
        return prod(axis.size for axis in self.axes[place + 1 :])

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates, one for each axis."""
        return sum(coordinates[axis.name] * self.stride(axis.name) for axis in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank is along every axis."""
        return {a.name: rank // self.stride(a.name) % a.size for a in self.axes}

    def ranks_on_a_node(self, names: Sequence[str]) -> int:
        """Return how many of rank 0's group along these axes are on its node.

        Other groups are alike where axes and nodes divide one another.
        """
        offsets = [0]
        for name in names:
            steps = range(self.length(name))
            offsets = [base + i * self.stride(name) for base in offsets for i in steps]
        return sum(offset < self.ranks_per_node for offset in offsets)


THE_DEVICE = "the device"  # the class of a mesh of one


class RankClass(Node):
    """Ranks whose schedules are equal but for coordinates.

    They are all ranks whose coordinate is in the cell of every axis; an axis without a cell is
    whole. Stage 2 of a pipeline is `{"pp": (2,)}`.
    """

    name: Annotated[str, Field(min_length=1)]
    schedule: str
    cells: dict[str, Annotated[tuple[Index, ...], Field(min_length=1)]]

    def cell(self, axis: str, size: int) -> tuple[int, ...]:
        """The coordinates along an axis of that size."""
        return self.cells.get(axis, tuple(range(size)))


Side = tuple[str, str]  # a class by its name, and the id of its op


class Exchange(Node):
    """The sides that meet: one op of each class that takes part; a class that both sends and
    receives along a whole axis has two."""

    sides: Annotated[tuple[Side, ...], Field(min_length=1)]


class Schedule(MeshDocument):
    """What every rank of a mesh does in a training step; one device is a mesh of one rank.

    `schedules` are those of ranks, with `Communicate` ops; classes may share one. `order` is
    one order of all exchanges that every class's own order of communication is a part of.
    `layout`, with `model`, `seq_len`, `global_batch` (in sequences), `precision` and `attention`,
    is what the schedules were made from. `machine` is the profile of the cluster, or the device's.
    """

    rank_kind: ClassVar[type[Node]] = RankSchedule

    schema_version: Literal[1] = 1
    mesh: Mesh
    classes: Annotated[tuple[RankClass, ...], Field(min_length=1)]
    schedules: dict[str, RankSchedule]
    order: tuple[Exchange, ...]
    model: dict[str, JsonValue]
    layout: dict[str, JsonValue]
    seq_len: Count
    global_batch: Count
    precision: str = "bf16"
    attention: str = "flash"
    model_flops: PositiveFlops
    machine: MachineRef

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = [one.name for one in self.classes]
        if len(set(names)) < len(names):
            raise PydanticCustomError("class_twice", "two classes of ranks have one name")
        for one in self.classes:
            if one.schedule not in self.schedules:
                raise PydanticCustomError(
                    "unknown_schedule",
                    "class '{name}' has schedule '{schedule}', which the document lacks",
                    {"name": one.name, "schedule": one.schedule},
                )
            for axis, cell in one.cells.items():
                known = axis in self.mesh.names
                if (
                    not known
                    or list(cell) != sorted(set(cell))
                    or cell[-1] >= self.mesh.length(axis)
                ):
                    raise PydanticCustomError(
                        "bad_cell",
                        "class '{name}' has cell {cell} of axis '{axis}': coordinates must rise "
                        "and be of an axis of the mesh",
                        {"name": one.name, "cell": str(cell), "axis": axis},
                    )
        return self

    @classmethod
    def of_rank(cls, rank: RankSchedule) -> Self:
        """Return the schedule of one device, which has no layout."""
        work = rank.workload
        return cls(
            mesh=Mesh(axes=(Axis(name="dp", size=1),), ranks_per_node=1),
            classes=(RankClass(name=THE_DEVICE, schedule=THE_DEVICE, cells={}),),
            schedules={THE_DEVICE: rank},
            order=(),
            model=rank.model.spec | {"name": rank.model.name},
            layout={},
            seq_len=work.seq_len,
            global_batch=work.sequences_per_step,
            model_flops=rank.model_flops,
            machine=rank.machine,
        )

    @property
    def is_one_device(self) -> bool:
        """Whether it is one device's alone; a layout may have a single rank, too."""
        return [one.name for one in self.classes] == [THE_DEVICE] and self.mesh.size == 1

    @property
    def only(self) -> RankSchedule:
        """What the one device does.

        Raises:
            ArgumentError: the schedule is of ranks of a layout.
        """
        if not self.is_one_device:
            raise ArgumentError(
                f"this is asked of one device's schedule, and the one given is of "
                f"{self.mesh.size:,} rank(s) of a layout, in {len(self.classes)} classes"
            )
        return self.schedules[THE_DEVICE]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the one device."""
        return self.only.tensors

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots of the one device."""
        return self.only.slots

    @property
    def calls(self) -> dict[str, KernelCall]:
        """Kernel calls of the one device, by name."""
        return self.only.calls

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops of the one device, in issue order."""
        return self.only.ops

    @property
    def carried(self) -> tuple[Carried, ...]:
        """Where the one device has what passes from step to step."""
        return self.only.carried

    @property
    def caps(self) -> Caps:
        """Caps of the one device, in bytes."""
        return self.only.caps

    @property
    def workload(self) -> Workload:
        """The step of the one device."""
        return self.only.workload

    @property
    def recipe(self) -> dict[str, JsonValue]:
        """The recipe of the one device, as fields."""
        return self.only.recipe

    @property
    def policy(self) -> str:
        """By whose rules the one device was planned."""
        return self.only.policy

    @property
    def bound(self) -> StepBound | None:
        """The lower bound of the one device, if it has one."""
        return self.only.bound

    def records(self) -> list[dict[str, object]]:
        """A row for each op of one device, in issue order; see `RankSchedule.records`."""
        return self.only.records()

    def __repr__(self) -> str:
        if self.is_one_device:
            return repr(self.only)
        ranks = f"{self.mesh.size:,} ranks in {len(self.classes)} classes"
        return f"<Schedule of {ranks}, {self.num_ops:,} ops>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return self.only._repr_html_() if self.is_one_device else facts_html(repr(self), {})

    @property
    def num_ops(self) -> int:
        """The ops of one rank of each class together."""
        return sum(len(self.of(one).ops) for one in self.classes)

    @property
    def is_packed(self) -> bool:
        """Whether sequences are documents side by side, of at most `seq_len` tokens."""
        return any(part.workload.packing is not None for part in self.schedules.values())

    @property
    def tokens_per_step(self) -> int:
        """The tokens that all replicas together train on."""
        if self.is_one_device:
            return self.workload.tokens_per_step
        if not self.is_packed:
            return self.seq_len * self.global_batch
        axes = [axis for axis in ("dp", "ep") if axis in self.mesh.names]
        replicas = prod(map(self.mesh.length, axes))
        return self.of(self.classes[0]).workload.tokens_per_step * replicas

    def of(self, one: RankClass) -> RankSchedule:
        """The schedule of a class."""
        return self.schedules[one.schedule]

    def num_ranks(self, one: RankClass) -> int:
        """How many ranks a class has."""
        count = 1
        for axis in self.mesh.axes:
            count *= len(one.cell(axis.name, axis.size))
        return count


def _record(op: Op, sizes: dict[str, int]) -> dict[str, object]:
    found: dict[str, object] = {"op_id": op.op_id, "kind": op.kind, "queue": op.stream.queue}
    if isinstance(op, Compute | Communicate):
        found |= {"tensor": None, "size_bytes": None}
        found |= {"call": op.call} if isinstance(op, Compute) else {"call": op.collective}
        found |= {f"label.{name}": value for name, value in op.label.model_dump().items()}
    else:
        found |= {"tensor": op.tensor, "size_bytes": sizes[op.tensor]}
    return found | {"waits": " ".join(op.waits), "waits_previous": " ".join(op.waits_previous)}


def _unique(what: str, ids: list[str]) -> set[str]:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise PydanticCustomError(
                "duplicate_id", "{what} '{name}' is declared twice", {"what": what, "name": name}
            )
        seen.add(name)
    return seen


def _unknown(what: str, where: str, field: str, name: str) -> PydanticCustomError:
    return PydanticCustomError(
        "unknown_id",
        "{what} '{where}' names {field} '{name}', which the schedule does not declare",
        {"what": what, "where": where, "field": field, "name": name},
    )


def _known(tensors: set[str], slots: set[str], where: str, tensor: str, slot: str) -> None:
    if tensor not in tensors:
        raise _unknown("op", where, "tensor", tensor)
    if slot not in slots:
        raise _unknown("op", where, "slot", slot)
