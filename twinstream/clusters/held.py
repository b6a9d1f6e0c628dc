"""What a sum over replicas reads, held while the backward pass goes on beside it."""

from twinstream.models.lowering.communication_tasks import COMMUNICATE
from twinstream.models.lowering.under_way import UnderWay
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.ops import TaskOperand


def with_held(chain: Chain) -> Chain:
    """The chain as a planner sees it, where whole gradients stay until their sum is waited for.

    To a planner, tasks run one after the other: a gradient that is scattered is free after that,
    and the next layer's backward would have its bytes, and wait for the sum. So a later sum reads
    it too, or at the latest the last one of the pass.
    """
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    scattered = {task.task_id: task for task in chain.tasks if _scatters(chain, task)}
    under_way, held = UnderWay(), dict[str, tuple[TaskOperand, ...]]()
    for name, task in scattered.items():
        due = under_way.issue(name, sizes[task.operands[0].tensor])
        held[name] = tuple(_held(scattered[each]) for each in due)
    if scattered:
        held[name] += tuple(_held(scattered[each]) for each in under_way.finish() if each != name)
    tasks = tuple(
        task.model_copy(update={"operands": task.operands + held.get(task.task_id, ())})
        for task in chain.tasks
    )
    return chain.model_copy(update={"tasks": tasks})


def _scatters(chain: Chain, task: Task) -> bool:
    """Whether a task reads a whole gradient and writes its sum's shard."""
    call = chain.calls[task.call]
    is_sum = call.kernel == COMMUNICATE and call.attributes["collective"] == "reduce_scatter"
    return is_sum and task.operands[0].mode == "read"


def _held(task: Task) -> TaskOperand:
    (gradient, _) = task.operands
    return gradient.model_copy(update={"name": f"held.{gradient.tensor}"})
