"""A stage as a chain for the planner: runs of ops that belong together become one task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twinstream.clusters.offloading.movable import Places, StageTimes
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Communicate, Compute, KernelCall, Label, Op, TaskOperand
from twinstream.schedule.workload import Workload

_Key = tuple[object, ...]


@dataclass
class Block:
    """Ops from `begin` to `end` in issue order, which find all they use on the device.

    `reads` has the version that each placed tensor must have at the beginning, `makes` what it has
    at the end where that is another; `fresh` what is written without being read.
    """

    begin: int
    end: int
    label: Label
    reads: dict[str, int] = field(default_factory=dict)
    makes: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    first_compute: int | None = None

    def add(self, at: int, op: Compute | Communicate, placed: frozenset[str]) -> None:
        """Take in the op at a position."""
        self.end = at + 1
        if self.first_compute is None and isinstance(op, Compute):
            self.first_compute = at
        for operand in op.operands:
            name = operand.tensor
            if name not in placed:
                continue
            if name not in self.order:
                self.order.append(name)
                if operand.mode in ("read", "update"):
                    self.reads[name] = operand.version
            if operand.mode == "update":
                self.makes[name] = operand.version + 1
            elif operand.mode == "write":
                self.makes[name] = operand.version

    def operands(self) -> tuple[TaskOperand, ...]:
        """As those of one task: what is read and made is an operand twice."""
        found = []
        for name in self.order:
            if name in self.reads:
                found.append(_operand(f"{name}.in", name, self.reads[name], "read"))
            if name in self.makes:
                found.append(_operand(f"{name}.out", name, self.makes[name], "write"))
        return tuple(found)


def blocks_of(ops: Sequence[Op], placed: frozenset[str], together: int = 1) -> list[Block]:
    """Computation of one microbatch in a row is a block, and what is said in between.

    It is that of one layer, or of so many together.
    """
    found: list[Block] = []
    current: _Key = ()
    for at, op in enumerate(ops):
        assert isinstance(op, Compute | Communicate), "a lowered stage has no copies"
        key = _key(op, together) if isinstance(op, Compute) else current
        if not found or (key != current and found[-1].first_compute is not None):
            found.append(Block(at, at, op.label))
        if isinstance(op, Compute):
            current = key
            if found[-1].first_compute is None:
                found[-1].label = op.label
        found[-1].add(at, op, placed)
    return found


def few_blocks(
    ops: Sequence[Op], placed: frozenset[str], sizes: Mapping[str, int], limits: tuple[int, int]
) -> list[Block]:
    """Blocks of as few layers as make no more than a number of them.

    Args:
        sizes: bytes of every tensor.
        limits: most blocks; and the most bytes that a block of several layers may work on.
    """
    most_blocks, most_bytes = limits
    found = blocks_of(ops, placed)
    together = 1
    while len(found) > most_blocks:
        together *= 2
        larger = blocks_of(ops, placed, together)
        if max(sum(sizes[name] for name in block.order) for block in larger) > most_bytes:
            break
        if len(larger) == len(found):
            break
        found = larger
    return found


def chain_of(
    schedule: Schedule, blocks: Sequence[Block], places: Places, times: StageTimes, machine: Machine
) -> Chain:
    """The chain of a stage's blocks, each as long as it takes with everything on the device.

    That includes waiting for other stages, so that copies are planned to hide there, too.
    """
    calls: dict[str, KernelCall] = {}
    tasks = []
    for number, (block, time_ns) in enumerate(zip(blocks, _block_ns(blocks, times), strict=True)):
        call = f"{block.label.kind}.{round(time_ns)}"
        if call not in calls:
            works = (_lasting(time_ns, machine),) if round(time_ns) else ()
            calls[call] = KernelCall(kernel="cluster.block", attributes={}, cost=works)
        tasks.append(
            Task.made(
                task_id=f"block.{number}", call=call, operands=block.operands(), label=block.label
            )
        )
    tensors = tuple(
        tensor
        if tensor.tensor_id in places.movable
        else tensor.model_copy(update={"role": "scratch"})
        for tensor in schedule.tensors
        if tensor.tensor_id in places.placed
    )
    workload = schedule.workload
    return Chain(
        tensors=tensors, calls=calls, tasks=tuple(tasks), recomputes=(), inputs=(), outputs=(),
        persistent=tuple(c.tensor for c in schedule.carried if c.tensor in places.placed),
        round_starts=(0,), model=schedule.model, recipe=schedule.recipe,
        workload=Workload(seq_len=workload.seq_len, chunk_tokens=workload.chunk_tokens,
                          chunks_per_round=1, rounds_per_step=1),
        model_flops=schedule.model_flops,
    )  # fmt: skip


def _key(op: Compute, together: int) -> _Key:
    label = op.label
    if label.layer is None or label.round is None:  # of no layer, or of no microbatch
        return (op.op_id,)
    return label.layer // together, label.round


def _operand(name: str, tensor: str, version: int, mode: str) -> TaskOperand:
    return TaskOperand.made(name=name, tensor=tensor, version=version, mode=mode, num_parts=None)


def _block_ns(blocks: Sequence[Block], times: StageTimes) -> list[float]:
    """From the start of a block's first computation to that of the next, around the pass."""
    found = [0.0] * len(blocks)
    at = [
        (i, times.start_ns[b.first_compute])
        for i, b in enumerate(blocks)
        if b.first_compute is not None
    ]
    ends = [start for _, start in at[1:]] + [at[0][1] + times.pass_ns]
    for (number, start_ns), end_ns in zip(at, ends, strict=True):
        found[number] = max(0.0, end_ns - start_ns)
    return found


def _lasting(time_ns: float, machine: Machine) -> Work:
    """Work that takes so long and hardly any memory traffic."""
    flops = time_ns / 1e9 * machine.number("peak_fp32_flop_per_s")
    return Work(unit="vector", shape=(1,), flops=max(1, round(flops)), hbm_bytes=0, launches=0,
                dtype="float32")  # fmt: skip
