"""The schedule of a cluster: one schedule for each class of ranks, one order of all exchanges."""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.cluster.mesh import Axis, Mesh
from twinstream.schedule.document import Schedule
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Count, Index, PositiveFlops
from twinstream.schedule.workload import MachineRef


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


class ClusterSchedule(Node):
    """What every rank of a mesh does in a training step.

    `schedules` are ordinary schedules with `Communicate` ops; classes may share one. `order` is
    one order of all exchanges that every class's own order of communication is a part of.
    `layout`, with `model`, `seq_len`, `global_batch` (in sequences), `precision` and `attention`,
    is what the schedules were made from. `machine` is the profile of the cluster.
    """

    schema_version: Literal[1] = 1
    mesh: Mesh
    classes: Annotated[tuple[RankClass, ...], Field(min_length=1)]
    schedules: dict[str, Schedule]
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

    def __repr__(self) -> str:
        ops = sum(len(self.schedules[one.schedule].ops) for one in self.classes)
        ranks = f"{self.mesh.size:,} ranks in {len(self.classes)} classes"
        return f"<ClusterSchedule of {ranks}, {ops:,} ops>"

    __str__ = __repr__

    @property
    def is_packed(self) -> bool:
        """Whether sequences are documents side by side, of at most `seq_len` tokens."""
        return any(part.workload.packing is not None for part in self.schedules.values())

    @property
    def tokens_per_step(self) -> int:
        """Of all replicas together."""
        if not self.is_packed:
            return self.seq_len * self.global_batch
        replicas = self.mesh.length("dp") if "dp" in self.mesh.names else 1
        return self.of(self.classes[0]).workload.tokens_per_step * replicas

    def of(self, one: RankClass) -> Schedule:
        """The schedule of a class."""
        return self.schedules[one.schedule]

    def num_ranks(self, one: RankClass) -> int:
        """How many ranks a class has."""
        count = 1
        for axis in self.mesh.axes:
            count *= len(one.cell(axis.name, axis.size))
        return count


THE_DEVICE = "the device"  # the class of a mesh of one


def as_cluster(schedule: Schedule | ClusterSchedule) -> ClusterSchedule:
    """One device's schedule as that of a mesh of one rank; a mesh's as it is."""
    if isinstance(schedule, ClusterSchedule):
        return schedule
    work = schedule.workload
    return ClusterSchedule(
        mesh=Mesh(axes=(Axis(name="dp", size=1),), ranks_per_node=1),
        classes=(RankClass(name=THE_DEVICE, schedule=THE_DEVICE, cells={}),),
        schedules={THE_DEVICE: schedule},
        order=(),
        model=schedule.model.spec | {"name": schedule.model.name},
        layout={},
        seq_len=work.seq_len,
        global_batch=work.sequences_per_step,
        model_flops=schedule.model_flops,
        machine=schedule.machine,
    )
