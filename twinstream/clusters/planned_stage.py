"""Plan one stage of a pipeline, and put what it says to other ranks between its kernels."""

from dataclasses import dataclass
from itertools import pairwise

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.parallel.layout import LayoutError
from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.choices import Choices
from twinstream.planner.emit.merged_chain import MergedChain, without_tensors
from twinstream.planner.search.one_chain import OneChain, plan_of_chain
from twinstream.schedule.chain import COMMUNICATE, Chain, SlotPools, Task
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import TaskOperand
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import DEVICE
from twinstream.simulator.replay import steady_state

_MOST_ATTEMPTS = 4
_SPARE = 2  # slots of messages that are left free


@dataclass(frozen=True)
class PlannedStage:
    """A stage's schedule; `alone_ns` is what its step takes if all it says takes no time."""

    schedule: RankSchedule
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
    merged = _without_messages(chain, overlaps=overlaps, pooled=pooled)
    source = OneChain(merged.planned, machine, merged.left_of(caps), choices)
    emitted = plan_of_chain(source, steady_state, _MOST_ATTEMPTS)
    if emitted is None:
        messages = f", of which messages take {gib(size)}" if (size := merged.apart_bytes) else ""
        raise LayoutError(
            f"{name} does not fit {_room_text(caps)}{messages}; a larger --device-mem or "
            "--host-mem would do"
        )
    schedule = merged.written_out(emitted.schedule, with_library_memory(caps, chain))
    return PlannedStage(schedule, steady_state(emitted.schedule, machine).step_ns)


def _without_messages(chain: Chain, *, overlaps: bool, pooled: bool) -> MergedChain:
    """The chain without what is sent or received: a message is part of the task that follows it.

    Pooled, messages of one size that are used one after the other share slots, of which a few stay
    free: one may then be on its way while the next ones are made.
    """
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in chain.tensors}
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    exchanged = {
        roots[operand.tensor]: None
        for task in chain.tasks
        if _is_message(chain, task)
        for operand in task.operands
    }
    pools = {
        name: (f"message.{sizes[name] if pooled else name}", _SPARE if pooled else 0)
        for name in exchanged
    }
    members: dict[str, list[Task]] = {
        again.task.task_id: [again.task] for again in chain.recomputes
    }
    before: list[Task] = []
    last = before
    for task in chain.tasks:
        before.append(task)
        if not _is_message(chain, task):
            last = members[task.task_id] = before
            before = []
    last += before
    planned = without_tensors(_with_held(chain) if overlaps else chain, exchanged, members)
    whole = chain.model_copy(update={"pools": SlotPools(pools)})
    return MergedChain(whole, planned, members, ())


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


def _is_message(chain: Chain, task: Task) -> bool:
    call = chain.calls[task.call]
    return call.kernel == COMMUNICATE and call.attributes["collective"] in ("send", "recv")
