"""Operations of a schedule, in issue order on named streams."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.cost import Work
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Count, Index, PositiveCount

Attribute = bool | int | float | str | tuple[int, ...]
Mode = Literal["read", "write", "update", "scratch"]
Processor = Literal["device", "host"]
HOST_COMPUTE = "host_compute"  # the queue of what the host's cores compute
DISK_READ = "disk_read"  # the queue of what is read from a disk into host memory
DISK_WRITE = "disk_write"  # and of what is written from there
DISK_QUEUES = (DISK_READ, DISK_WRITE)


class Stream(Node):
    """An in-order queue. By convention `compute`, `h2d`, `d2h`, `host`; names are open.

    What the host CPU computes has the queue `host_compute` (`HOST_COMPUTE`), what is read from a
    disk `disk_read` (`DISK_READ`), what is written there `disk_write` (`DISK_WRITE`).
    """

    device: Index = 0
    queue: str

    def __str__(self) -> str:
        return f"{self.device}:{self.queue}"


Phase = Literal["forward", "backward", "recompute"]


class Label(Node):
    """What people and reports want to know of an op; nothing dispatches on it.

    `phase` tells tasks apart whose kind is of several phases.
    """

    kind: str
    layer: Index | None = None
    chunk: Index | None = None
    round: Index | None = None
    level: str | None = None
    phase: Phase | None = None


class KernelCall(Node):
    """A kernel (registry key with implementation), its attributes and what it costs.

    Its operands lie in the memory of the `processor` that it runs on.
    """

    kernel: str
    attributes: dict[str, Attribute]
    cost: tuple[Work, ...]
    processor: Processor = "device"


class TaskOperand(Node):
    """A named use of a tensor.

    `read` finds `version`; `write` makes `version` (old content is dead); `update` reads
    `version` and makes `version + 1`; `scratch` leaves garbage (its version is 0). With
    `num_parts` the operand is only the first so many parts of a parent.
    """

    name: str
    tensor: str
    version: Count
    mode: Mode
    num_parts: PositiveCount | None = None


class Operand(TaskOperand):
    """A task operand with the slot it was given."""

    slot: str


class OpBase(Node):
    """What every op has: ids, its stream, and the ops it waits for on other streams.

    `waits` name ops issued earlier in the body, `waits_previous` ops of the pass before.
    """

    op_id: str
    stream: Stream
    waits: tuple[str, ...] = ()
    waits_previous: tuple[str, ...] = ()


class Compute(OpBase):
    """Runs `calls[call]` of the schedule; `task` is the chain task or recompute it carries out."""

    kind: Literal["compute"] = "compute"
    task: str
    call: str
    operands: tuple[Operand, ...]
    label: Label


class Copy(OpBase):
    """Copies one version of a tensor (or the first `num_parts` of its parts) between slots."""

    kind: Literal["copy"] = "copy"
    tensor: str
    version: Count
    source: str
    destination: str
    num_parts: PositiveCount | None = None


class Feed(OpBase):
    """The host fills an input slot: item `index` of the input named `source` of this step."""

    kind: Literal["feed"] = "feed"
    tensor: str
    version: Count
    slot: str
    source: str
    index: Count


class Fetch(OpBase):
    """The host takes a result out of a slot and hands it to the training loop as `sink`."""

    kind: Literal["fetch"] = "fetch"
    tensor: str
    version: Count
    slot: str
    sink: str


Reduction = Literal["rank_order", "pairwise", "library"]


CollectiveName = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv", "send", "recv"
]  # fmt: skip


class Communicate(OpBase):
    """One side of a collective, or of a message, among the ranks of a mesh (`schedule.cluster`).

    The group is all ranks that differ from this one along `axes` only. `send` and `recv` are
    along one axis: a send goes to the rank `shift` further (modulo the axis), a recv comes from
    the rank that is so; the two sides have opposite shifts. `sequence` counts, from 0 in every
    pass, the ops of a class that have the same communicator: (axes, queue) of a collective,
    (axis, shift, which of send and recv) of a message. Sides with equal group and sequence meet:
    none is through before all have begun (rendezvous).

    An all_reduce updates its operands, reduce_scatter and all_gather read one and write the
    other (or update one that holds both), all_to_all reads one and writes the other. A send_recv
    sends what it reads to the next rank of the group in rank order, the last to the first, and
    writes what comes from the one before. What a
    reduce_scatter reads may be several pieces, one behind the other, which are all summed, first
    those of the first rank. With `rank_order` sums are taken in rank order in float32, the same
    bits on any transport; with `pairwise` neighbours are added up two by two, then the sums of
    these, each rounded to the tensor's type: the order of half of the ranks is then part of that of
    all. With `library` they are taken as the library likes.

    With `last_first` the shards of what is gathered or scattered lie in the reverse of rank order.

    An all_to_all that reads a third operand, counts, sends rows to the ranks that have their
    experts, or back. The counts say of each rank of the group how many of its rows go to each
    expert (int32, [ranks, experts]); every rank has as many experts, in order. Of the two others
    the smaller has one rank's rows, expert by expert; the larger has the rows of a rank's experts,
    rank by rank, and room for all rows of all ranks.
    """

    kind: Literal["communicate"] = "communicate"
    collective: CollectiveName
    axes: Annotated[tuple[str, ...], Field(min_length=1)]
    shift: Annotated[int, Field(ge=-(2**20), le=2**20)] = 0
    sequence: Count
    operands: Annotated[tuple[Operand, ...], Field(min_length=1)]
    reduction: Reduction = "library"
    last_first: Literal[True] | None = None
    label: Label

    @property
    def counts(self) -> Operand | None:
        """The operand that says how many rows go to whom; None where as much goes to each."""
        has_some = self.collective == "all_to_all" and len(self.operands) == 3
        return self.operands[2] if has_some else None

    @model_validator(mode="after")
    def _shards_have_an_order(self) -> Self:
        shards = self.collective in ("all_gather", "reduce_scatter") and len(self.operands) == 2
        if self.last_first and not shards:
            raise PydanticCustomError(
                "order_of_no_shards",
                "op '{op}': last_first is of an all_gather or reduce_scatter from one tensor into "
                "another",
                {"op": self.op_id},
            )
        return self

    @model_validator(mode="after")
    def _shift_is_of_messages(self) -> Self:
        message = self.collective in ("send", "recv")
        if message != bool(self.shift) or (message and len(self.axes) != 1):
            raise PydanticCustomError(
                "shift_of_message",
                "op '{op}': a send or recv is along one axis with a shift other than 0, a "
                "collective has none",
                {"op": self.op_id},
            )
        return self


Op = Annotated[Compute | Copy | Feed | Fetch | Communicate, Field(discriminator="kind")]
