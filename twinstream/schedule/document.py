"""The schedule: one loop body, decided in advance, run again and again."""

from collections import Counter
from typing import Literal, Self

from pydantic import JsonValue, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node, facts_html
from twinstream.schedule.numbers import Finite, PositiveFlops, Size
from twinstream.schedule.ops import Communicate, Compute, Copy, KernelCall, Op
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import Carried, Slot, Tensor
from twinstream.schedule.workload import MachineRef, ModelRef, Workload


class Caps(Node):
    """Bytes the process may take of each memory; None is no limit.

    Not the arena's are, of the device cap, `device_reserve_bytes`, which context and libraries
    take, and `library_bytes`, which libraries allocate while a kernel runs.
    """

    device_bytes: Size | None = None
    host_bytes: Size | None = None
    device_reserve_bytes: Size = 0
    library_bytes: Size = 0

    @property
    def outside_arena_bytes(self) -> int:
        """The device memory that is taken beside its arena."""
        return self.device_reserve_bytes + self.library_bytes

    def arena_bytes(self, tier_kind: str) -> int | None:
        """Return how large the tier's arena may be."""
        if tier_kind == "device" and self.device_bytes is not None:
            return max(0, self.device_bytes - self.outside_arena_bytes)
        return self.host_bytes if tier_kind == "host" else None

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


class Schedule(Node):
    """Where every tensor of a training step lives, when it moves, and what is recomputed.

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
    consumed: tuple[Carried, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Schedule of {self.model.name} on {self.machine.name}, policy {self.policy}: "
            f"{len(self.ops):,} ops, {self.workload.tokens_per_step:,} tokens a step>"
        )

    __str__ = __repr__

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
            ),
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
