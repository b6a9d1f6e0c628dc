"""Does a schedule carry out its chain? The definition, written down again without `conforms`."""

from collections import Counter

from tests.helpers.schedule_oracle import leaves_of
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Feed, Fetch, TaskOperand
from twinstream.schedule.tensors import Tensor

TASKS = "tasks"


def conformity_problems(schedule: RankSchedule, chain: Chain) -> set[str]:
    """How the schedule differs from the chain: names of rules, TASKS for its compute ops."""
    found: set[str] = set()
    declared, wanted = ({t.tensor_id: t for t in d.tensors} for d in (schedule, chain))
    if declared != wanted:
        found.add("TensorDiffers")
    if any(chain.calls.get(name) != call for name, call in schedule.calls.items()):
        found.add("CallDiffers")
    if not _same_tasks(schedule, chain):
        found.add(TASKS)
    streams = {
        (schedule.calls[o.call].processor, str(o.stream))
        for o in schedule.ops
        if isinstance(o, Compute) and o.call in schedule.calls
    }
    if len(streams) > len({processor for processor, _ in streams}):
        found.add("StreamsDiffer")
    if schedule.model_flops != chain.model_flops:
        found.add("WorkDiffers")
    if schedule.caps.library_bytes < chain.library_bytes:
        found.add("WorkDiffers")
    feeds = [o for o in schedule.ops if isinstance(o, Feed)]
    fetches = [o for o in schedule.ops if isinstance(o, Fetch)]
    if Counter((o.tensor, o.version, o.source, o.index) for o in feeds) != Counter(
        (i.tensor, i.version, i.source, i.index) for i in chain.inputs
    ) or Counter((o.tensor, o.version, o.sink) for o in fetches) != Counter(
        (o.tensor, o.version, o.sink) for o in chain.outputs
    ):
        found.add("InputsDiffer")
    carried = {leaf for c in schedule.carried for leaf in _leaf_names(wanted, c.tensor)}
    if any(set(_leaf_names(wanted, root)) - carried for root in chain.persistent):
        found.add("PersistentNotCarried")
    persistent = {leaf for root in chain.persistent for leaf in _leaf_names(wanted, root)}
    if carried - persistent:
        found.add("CarriedNotPersistent")
    consumed = {leaf for c in schedule.consumed for leaf in _leaf_names(wanted, c.tensor)}
    if consumed != {leaf for root in chain.consumed for leaf in _leaf_names(wanted, root)}:
        found.add("ConsumedDiffers")
    return found


def _leaf_names(tensors: dict[str, Tensor], name: str) -> list[str]:
    return [leaf.tensor_id for leaf in leaves_of(tensors, name, None)] if name in tensors else []


def _same_tasks(schedule: RankSchedule, chain: Chain) -> bool:
    """The compute ops are the chain's tasks in order, recomputes right before theirs."""
    recomputes = {r.task.task_id: r for r in chain.recomputes}
    computes = [op for op in schedule.ops if isinstance(op, Compute)]
    chosen = [recomputes[op.task] for op in computes if op.task in recomputes]
    if len({r.group for r in chosen}) != len(chosen):
        return False
    expected = []
    for task in chain.tasks:
        here = {r.task.task_id: r.task for r in chosen if r.before == task.task_id}
        used = [op.task for op in computes if op.task in here]
        expected += [here[name] for name in used] + [task]
    return [(op.task, op.call, [_operand(o) for o in op.operands]) for op in computes] == [
        (t.task_id, t.call, [_operand(o) for o in t.operands]) for t in expected
    ]


def _operand(o: TaskOperand) -> tuple[str, str, int, str, int | None]:
    return o.name, o.tensor, o.version, o.mode, o.num_parts
