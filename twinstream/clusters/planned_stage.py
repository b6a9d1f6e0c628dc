"""Plan one stage of a layout, and put what it says to other ranks between its kernels."""

from dataclasses import dataclass
from itertools import pairwise

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.emit.merged_chain import MergedChain, without_tensors
from twinstream.planner.search.one_chain import OneChain, plan_of_chain
from twinstream.schedule.chain import COMMUNICATE, Chain, SlotPools, Task
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import TaskOperand
from twinstream.simulator.replay import steady_state

_MOST_ATTEMPTS = 4
_SPARE = 2  # slots of messages that are left free


@dataclass(frozen=True)
class PlannedStage:
    """A stage's schedule, and what of it the planner saw: without what was merged into tasks."""

    schedule: RankSchedule
    planned: RankSchedule


def plan_stage(
    merged: MergedChain, machine: Machine, caps: Caps, choices: Choices = OPEN,
    most_attempts: int = _MOST_ATTEMPTS,
) -> PlannedStage | None:  # fmt: skip
    """Plan a stage's chain with its communication merged into tasks, and write that out again.

    With a disk it is the faster of two, one of them without: a disk makes none slower. Returns None
    where nothing fits the caps.
    """
    left, plain = merged.left_of(caps), caps.model_copy(update={"disk_bytes": None})
    rooms = [left] if caps.disk_bytes is None else [merged.left_of(plain), left]
    sources = [OneChain(merged.planned, machine, one, choices) for one in rooms]
    found = [plan_of_chain(source, steady_state, most_attempts) for source in sources]
    plans = [one.schedule for one in found if one is not None]
    if not plans:
        return None
    planned = plans[0]
    if len(plans) > 1:
        planned = min(plans, key=lambda plan: steady_state(plan, machine).step_ns)
    schedule = merged.written_out(planned, with_library_memory(caps, merged.whole))
    return PlannedStage(schedule, planned)


def without_messages(chain: Chain, *, overlaps: bool, pooled: bool) -> MergedChain:
    """Return the chain without what is sent or received: that is part of the task that follows it.

    What is sent or received has slots for the whole step, which nothing else is in: so no message
    waits for room that copies have to make, and stages do not wait so for one another. Pooled,
    messages of one size that are used one after the other share slots, of which a few stay free:
    one may then be on its way while the next ones are made.

    Args:
        overlaps: sums over replicas run beside the next group's backward.
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
