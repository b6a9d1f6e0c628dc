"""A training step as a linear chain of tasks over named tensors with declared versions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Count, PositiveFlops, Size
from twinstream.schedule.ops import KernelCall, Label, TaskOperand
from twinstream.schedule.tensors import Tensor
from twinstream.schedule.workload import ModelRef, Workload

COMMUNICATE = "communicate"  # the kernel of tasks that become `Communicate` ops


class Task(Node):
    """One unit of computation; tasks run in chain order."""

    task_id: str
    call: str
    operands: tuple[TaskOperand, ...]
    label: Label


class Recompute(Node):
    """A task that may be run again right before task `before`, to make versions that exist.

    At most one of a `group` is used; a planner that keeps or offloads what it makes leaves it
    out.
    """

    task: Task
    before: str
    group: str


class Input(Node):
    """Version `version` of `tensor` comes from the host: item `index` of input `source`."""

    tensor: str
    version: Count
    source: str
    index: Count


class Output(Node):
    """Version `version` of `tensor` goes to the host as `sink`."""

    tensor: str
    version: Count
    sink: str


@dataclass(frozen=True)
class SlotPools:
    """Which buffers of a chain have slots from pools.

    A buffer is a root tensor. One that is in several slots at a time (a block of a ring, which is
    sent on while the next one comes) has a buffer for each of them.

    Attributes:
        pools: by buffer, its pool and how many slots of that stay free besides.
        several: of tensors in several slots, by task and name of the operand, which buffer it is.
    """

    pools: Mapping[str, tuple[str, int]]
    several: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def without(self, tensors: frozenset[str]) -> "SlotPools":
        """The same but for some tensors, of which none is in several slots."""
        pools = {name: pool for name, pool in self.pools.items() if name not in tensors}
        return SlotPools(pools, self.several)


class Chain(Node):
    """Everything a planner reads.

    `persistent` root tensors are carried from step to step (their version at the start of a step
    is 0); all other content is made within the step, or `consumed`: it is there before, at version
    0, and need not be after. What consumes is run once. `model_flops` is the count of design
    section 8 for the whole step (MFU); `library_bytes` are the most that any call's library
    allocates on the device beside the arena; `round_starts` has the index of each round's first
    task; `tensors` lists parents before their parts; `pools` say which buffers
    have slots that nothing else is in. Model, workload, recipe and, of ranks, layout and stage are
    all it takes to lower the chain again.
    """

    tensors: tuple[Tensor, ...]
    calls: dict[str, KernelCall]
    tasks: tuple[Task, ...]
    recomputes: tuple[Recompute, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    persistent: tuple[str, ...]
    round_starts: tuple[Count, ...]
    workload: Workload
    model: ModelRef
    recipe: dict[str, JsonValue]
    model_flops: PositiveFlops
    library_bytes: Size = 0
    consumed: tuple[str, ...] = ()
    pools: SlotPools = SlotPools({})
