"""Plan one stage of a pipeline, and put what it says to other ranks between its kernels."""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from twinstream.clusters.layout import LayoutError
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.choices import Choices
from twinstream.planner.search.one_chain import OneChain, plan_of_chain
from twinstream.schedule.chain import COMMUNICATE, Chain, Task
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Communicate, Compute, Op, Operand, Stream, TaskOperand
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import DEVICE, Slot
from twinstream.simulator.replay import steady_state

_MOST_ATTEMPTS = 4
_SPARE = 2  # slots of messages that are left free


@dataclass(frozen=True)
class PlannedStage:
    """A stage's schedule; `alone_ns` is what its step takes if all it says takes no time."""

    schedule: Schedule
    alone_ns: float


def planned_stage(
    name: str,
    chain: Chain,
    machine: Machine,
    within: tuple[Caps, Choices],
    *,
    overlaps: bool,
    pooled: bool,
) -> PlannedStage:
    """The stage's chain without its messages planned, and these put between its tasks.

    What is sent or received has slots for the whole step, which nothing else is in: so no message
    waits for room that copies have to make, and stages do not wait so for one another.

    Args:
        within: the caps, and what is fixed of the plan.
        overlaps: sums over replicas run beside the next group's backward.
        pooled: messages that follow one another share slots.

    Raises:
        LayoutError: the stage does not fit.
    """
    caps, choices = within
    fixed = _exchanged(chain, pooled=pooled)
    slots = {slot.slot_id: slot for slot in fixed.values()}
    fixed_bytes = sum(slot.size_bytes + slot.tier.alignment_bytes for slot in slots.values())
    device = None if caps.device_bytes is None else max(0, caps.device_bytes - fixed_bytes)
    lean = _without(_with_held(chain) if overlaps else chain, fixed)
    left = caps.model_copy(update={"device_bytes": device})
    source = OneChain(lean, machine, left, choices)
    emitted = plan_of_chain(source, steady_state, _MOST_ATTEMPTS)
    if emitted is None:
        messages = f", of which messages take {gib(fixed_bytes)}" if fixed_bytes else ""
        raise LayoutError(
            f"{name} does not fit {_room_text(caps)}{messages}; a larger --device-mem or "
            "--host-mem would do"
        )
    whole_caps = with_library_memory(caps, chain)
    schedule = _with_messages(chain, emitted.schedule, fixed)
    schedule = schedule.model_copy(update={"caps": whole_caps})
    return PlannedStage(schedule, steady_state(emitted.schedule, machine).step_ns)


def _room_text(caps: Caps) -> str:
    """What tensors may take of both memories."""
    rooms = [("device", caps.arena_bytes(DEVICE.kind)), ("host", caps.host_bytes)]
    return " and ".join(f"{gib(room)} of {name} memory" for name, room in rooms if room is not None)


def _with_held(chain: Chain) -> Chain:
    """The chain as a planner sees it, where a gradient stays until the next one is summed.

    To a planner, tasks run one after the other: a gradient that is scattered is free after that,
    and the next group's backward would have its bytes, and wait for the sum. So the next sum reads
    it, too.
    """
    held = {
        after.task_id: _held(before)
        for before, after in pairwise(task for task in chain.tasks if _scatters(chain, task))
    }
    tasks = tuple(
        task.model_copy(update={"operands": (*task.operands, held[task.task_id])})
        if task.task_id in held
        else task
        for task in chain.tasks
    )
    return chain.model_copy(update={"tasks": tasks})


def _scatters(chain: Chain, task: Task) -> bool:
    """Whether a task reads a whole gradient and writes its sum's shard."""
    call = chain.calls[task.call]
    is_sum = call.kernel == COMMUNICATE and call.attributes["collective"] == "reduce_scatter"
    return is_sum and task.operands[0].mode == "read"


def _held(task: Task) -> TaskOperand:
    gradient = task.operands[0]
    return gradient.model_copy(update={"name": f"held.{gradient.tensor}"})


def _exchanged(chain: Chain, *, pooled: bool) -> dict[str, Slot]:
    """Slots of what is sent or received, by tensor, with all of which it is a part.

    Pooled, tensors of one size that are used one after the other share a slot, of which the one
    that has been free longest is taken, and only where `_SPARE` others are free: a message may then
    be on its way while the next ones are made.
    """
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in chain.tensors}
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    exchanged = {
        roots[operand.tensor]
        for task in chain.tasks
        if _is_message(chain, task)
        for operand in task.operands
    }
    uses: dict[str, list[int]] = {}
    for position, task in enumerate(chain.tasks):
        for operand in task.operands:
            if (root := roots[operand.tensor]) in exchanged:
                uses.setdefault(root, []).append(position)
    found: dict[str, Slot] = {}
    free: dict[int, list[tuple[int, Slot]]] = {}  # by size, sorted by since when
    for name, positions in uses.items():
        size = sizes[name]
        pool = free.setdefault(size, [])
        if pooled and sum(since < positions[0] for since, _ in pool) > _SPARE:
            found[name] = pool.pop(0)[1]
        else:
            found[name] = Slot(
                slot_id=f"message.{name}", tier=DEVICE, offset_bytes=0, size_bytes=size
            )
        insort(pool, (positions[-1], found[name]), key=itemgetter(0))
    return found


def _is_message(chain: Chain, task: Task) -> bool:
    call = chain.calls[task.call]
    return call.kernel == COMMUNICATE and call.attributes["collective"] in ("send", "recv")


def _without(chain: Chain, fixed: Mapping[str, Slot]) -> Chain:
    """What the planner sees: no messages, and nothing of what they are about."""
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in chain.tensors}

    def lean(task: Task) -> Task:
        operands = tuple(o for o in task.operands if roots[o.tensor] not in fixed)
        return task.model_copy(update={"operands": operands})

    return chain.model_copy(
        update={
            "tensors": tuple(t for t in chain.tensors if roots[t.tensor_id] not in fixed),
            "tasks": tuple(lean(task) for task in chain.tasks if not _is_message(chain, task)),
            "recomputes": tuple(
                again.model_copy(update={"task": lean(again.task)}) for again in chain.recomputes
            ),
        }
    )


def _with_messages(chain: Chain, plan: Schedule, fixed: Mapping[str, Slot]) -> Schedule:
    """The plan's ops with all operands, messages where the chain has them, waits derived anew."""
    end = max((s.offset_bytes + s.size_bytes for s in plan.slots if s.tier == DEVICE), default=0)
    placed: dict[str, Slot] = {}
    for slot in fixed.values():
        if slot.slot_id not in placed:
            start = -(-end // DEVICE.alignment_bytes) * DEVICE.alignment_bytes
            placed[slot.slot_id] = slot.model_copy(update={"offset_bytes": start})
            end = start + slot.size_bytes
    slots = (*plan.slots, *placed.values())
    ops = _Written(chain, plan, fixed).ops()
    calls = {name: call for name, call in plan.calls.items() if call.kernel != COMMUNICATE}
    return plan.model_copy(
        update={
            "ops": derive_waits(ops, chain.tensors, slots),
            "slots": slots,
            "tensors": chain.tensors,
            "calls": calls,
        }
    )


class _Written:
    """Ops of a plan written out again, with the chain's messages between them."""

    def __init__(self, chain: Chain, plan: Schedule, fixed: Mapping[str, Slot]) -> None:
        self._chain, self._plan, self._fixed = chain, plan, fixed
        self._roots = {t.tensor_id: t.parent or t.tensor_id for t in chain.tensors}
        self._tasks = {task.task_id: task for task in chain.tasks}
        self._tasks |= {again.task.task_id: again.task for again in chain.recomputes}
        self._counts: dict[tuple[object, ...], int] = {}

    def ops(self) -> tuple[Op, ...]:
        """A message comes before the op of the task that follows it in the chain."""
        found: list[Op] = []
        waiting = list(self._chain.tasks)[::-1]
        numbers = {task.task_id for task in self._chain.tasks}
        for op in self._plan.ops:
            if isinstance(op, Compute) and op.task in numbers:
                while waiting[-1].task_id != op.task:
                    found.append(self._message(waiting.pop()))
                waiting.pop()
            found.append(self._written(op))
        return (*found, *(self._message(task) for task in reversed(waiting)))

    def _written(self, op: Op) -> Op:
        if not isinstance(op, Compute):
            return op
        given = {operand.tensor: operand.slot for operand in op.operands}
        operands = self._operands(self._tasks[op.task], given)
        if self._plan.calls[op.call].kernel == COMMUNICATE:
            return self._communicate(self._tasks[op.task], operands)
        return op.model_copy(update={"operands": operands})

    def _message(self, task: Task) -> Op:
        return self._communicate(task, self._operands(task, {}))

    def _operands(self, task: Task, given: Mapping[str, str]) -> tuple[Operand, ...]:
        return tuple(
            Operand(**vars(one), slot=given.get(one.tensor) or self._slot(one.tensor))
            for one in task.operands
        )

    def _slot(self, tensor: str) -> str:
        return self._fixed[self._roots[tensor]].slot_id

    def _communicate(self, task: Task, operands: tuple[Operand, ...]) -> Communicate:
        told = self._chain.calls[task.call].attributes
        axes, shift = tuple(str(told["axes"]).split()), int(str(told.get("shift", 0)))
        key = (axes, shift, told["collective"]) if shift else (axes, told["queue"])
        self._counts[key] = self._counts.get(key, -1) + 1
        return Communicate.model_validate(
            {
                "op_id": task.task_id,
                "stream": Stream(queue=str(told["queue"])),
                "collective": told["collective"],
                "axes": axes,
                "shift": shift,
                "sequence": self._counts[key],
                "operands": operands,
                "reduction": told.get("reduction", "library"),
                "label": task.label,
            }
        )
