"""Derive, from a training schedule, the schedule that evaluates between two of its passes."""

from collections.abc import Iterable, Iterator

from twinstream.models.lowering.lower import lower_again
from twinstream.planner.evaluate.dataflow import Dataflow
from twinstream.planner.evaluate.errors import NoEvaluation
from twinstream.planner.evaluate.restoring import with_state_kept
from twinstream.schedule.chain import COMMUNICATE, Chain, Output, Task
from twinstream.schedule.cluster.communication import counted_anew
from twinstream.schedule.derived.flush import without_updates
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import require
from twinstream.schedule.ops import Communicate, Compute, Copy, Fetch, Op, Operand
from twinstream.schedule.proof.conforms import require_conforming
from twinstream.schedule.proof.verify import require_safe_rank


def evaluation_of(training: RankSchedule) -> RankSchedule:
    """Return the forward of a training schedule's first round as a schedule of its own; proven.

    It has the slots of the training, finds the state where a pass of the training leaves it, and
    leaves it there: so it runs in the same arenas between any two passes, and its peak is no
    higher. A pass of it takes `chunks_per_round` chunks and hands out their loss.

    Ops are those of the training on which the loss depends, in their order of issue; the head
    makes no gradients. Where they overwrite what the training carries from pass to pass, the
    training's own copy that saves it stays, and a copy at the end puts it back. Waits are derived
    anew: those of training also wait for what is not here.

    Where a pass begins with the updates of the one before, the evaluation is of the state after
    the training's flush, and leaves no gradients behind.

    Raises:
        NoEvaluation: the schedule is not one of training, or has no forward of the state that it
            carries: it says what stands in the way.
        UnsafeSchedule: the training schedule is not safe or not conforming itself.
    """
    require("training", training, RankSchedule)
    if training.workload.forward_only:
        raise NoEvaluation("the schedule is forward only already: give one of training")
    training = without_updates(training)
    chain = lower_again(training.model_copy(update={"workload": training.workload.forward}))
    schedule = forward_of(training, chain)
    require_safe_rank(schedule)
    require_conforming(schedule, chain)
    return schedule


def forward_of(training: RankSchedule, chain: Chain) -> RankSchedule:
    """Return the same, not proven; also for the schedule of one rank among several.

    Args:
        training: begins with no updates.
        chain: of the forward alone.

    Raises:
        NoEvaluation: the schedule does not carry it out.
    """
    ops = counted_anew(_ops(training, chain))
    calls = {name: call for name, call in chain.calls.items() if call.kernel != COMMUNICATE}
    return training.model_copy(
        update={
            "workload": chain.workload,
            "tensors": chain.tensors,
            "calls": calls,
            "ops": derive_waits(ops, chain.tensors, training.slots),
            "model_flops": chain.model_flops,
            "bound": None,
        }
    )


def _ops(training: RankSchedule, chain: Chain) -> tuple[Op, ...]:
    """Without sound waits."""
    tasks = _tasks(training, chain)
    flow = Dataflow(training, max(tasks) + 1)
    kept = flow.needed_by(tasks)
    ops = {position: tasks.get(position, training.ops[position]) for position in kept}
    results: list[Op] = []
    for output in chain.outputs:
        for position, op in _handed_out(training, output, tasks.values()):
            if op == training.ops[position]:  # before anything else is in its slot
                ops[position] = op
            else:
                results.append(op)
    return with_state_kept(training, chain, flow, ops, results)


def _tasks(training: RankSchedule, chain: Chain) -> dict[int, Compute | Communicate]:
    """By position in the training, its ops that carry out the tasks of a forward alone."""
    tasks = {task.task_id: task for task in chain.tasks}
    found: dict[int, Compute | Communicate] = {}
    for position, op in enumerate(training.ops):
        if isinstance(op, Compute) and op.task in tasks:
            found[position] = _forward_of(op, tasks.pop(op.task))
        elif isinstance(op, Communicate) and op.op_id in tasks:
            del tasks[op.op_id]
            found[position] = op
    if tasks:
        missing = sorted(tasks)
        raise NoEvaluation(
            f"the schedule does not carry out {', '.join(missing[:3])}: it is not one of training "
            "the model that it names"
        )
    return found


def _forward_of(op: Compute, task: Task) -> Compute:
    """The op with no operands but those of the task."""
    given = {operand.name: operand for operand in op.operands}
    operands = []
    for wanted in task.operands:
        held = given.get(wanted.name)
        same = held is not None and (held.mode, held.version) == (wanted.mode, wanted.version)
        # what training changes chunk by chunk (statistics), and nobody changes here
        only_read = held is not None and (held.mode, wanted.mode) == ("update", "read")
        if held is None or not (same or only_read):
            has = "lacks it" if held is None else f"has {held.mode} of version {held.version}"
            raise NoEvaluation(
                f"the forward needs {wanted.mode} of version {wanted.version} of "
                f"'{wanted.tensor}' in op '{op.op_id}', which {has}: this step does more before "
                "its loss than a forward of the state that it begins with"
            )
        operands.append(Operand(**vars(wanted), slot=held.slot))
    return op.model_copy(
        update={"call": task.call, "operands": tuple(operands), "label": task.label}
    )


def _handed_out(
    training: RankSchedule, output: Output, ops: Iterable[Compute | Communicate]
) -> Iterator[tuple[int, Op]]:
    """The copy and the fetch of a result, as training has them of that version or last; where."""
    fetches = [
        (position, op)
        for position, op in enumerate(training.ops)
        if isinstance(op, Fetch) and op.sink == output.sink
    ]
    if not fetches:
        raise NoEvaluation(f"the schedule hands out no '{output.sink}': it is not one of training")
    alike = [(position, op) for position, op in fetches if op.version == output.version]
    at, fetch = (alike or fetches)[-1]
    source = [o.slot for op in ops for o in op.operands if o.tensor == output.tensor][-1]
    if source != fetch.slot:
        copies = [
            (position, op)
            for position, op in enumerate(training.ops)
            if isinstance(op, Copy)
            and (op.tensor, op.version) == (fetch.tensor, fetch.version)
            and op.destination == fetch.slot
        ]
        if not copies:
            raise NoEvaluation(f"no single copy takes '{output.tensor}' to where it is handed out")
        position, copy = copies[-1]
        yield position, copy.model_copy(update={"version": output.version, "source": source})
    op_id = f"fetch.{output.tensor}.{output.version}"
    yield at, fetch.model_copy(update={"op_id": op_id, "version": output.version})
