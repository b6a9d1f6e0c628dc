"""Operations of a schedule, in issue order on named streams."""

from typing import Annotated, Literal

from pydantic import Field

from twinstream.schedule.cost import Work
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Count, Index, PositiveCount

Attribute = bool | int | float | str | tuple[int, ...]
Mode = Literal["read", "write", "update", "scratch"]
Processor = Literal["device", "host"]


class Stream(Node):
    """An in-order queue. By convention `compute`, `h2d`, `d2h`, `host`; names are open.

    What the host CPU computes has the queue `host_compute`.
    """

    device: Index = 0
    queue: str

    def __str__(self) -> str:
        return f"{self.device}:{self.queue}"


class Label(Node):
    """What people and reports want to know of an op; nothing dispatches on it."""

    kind: str
    layer: Index | None = None
    chunk: Index | None = None
    round: Index | None = None
    level: str | None = None


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


Op = Annotated[Compute | Copy | Feed | Fetch, Field(discriminator="kind")]
