"""Prove that a schedule computes exactly what a chain says: nothing dropped, nothing changed."""

from twinstream.schedule.chain import Chain, Recompute, Task
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute, Feed, Fetch, TaskOperand
from twinstream.schedule.violations import (
    CallDiffers,
    InputsDiffer,
    OperandsDiffer,
    PersistentNotCarried,
    TaskMissing,
    TaskUnexpected,
    TensorDiffers,
    UnsafeSchedule,
    Violation,
)


def conforms(schedule: Schedule, chain: Chain) -> list[Violation]:
    """All differences between what the schedule computes and the chain; empty is a proof."""
    return [
        *_tensor_violations(schedule, chain),
        *_task_violations(schedule, chain),
        *_host_violations(schedule, chain),
        *_carried_violations(schedule, chain),
    ]


def require_conforming(schedule: Schedule, chain: Chain) -> None:
    """Raise UnsafeSchedule unless `conforms` finds nothing."""
    if found := conforms(schedule, chain):
        raise UnsafeSchedule(found)


def _tensor_violations(schedule: Schedule, chain: Chain) -> list[Violation]:
    declared = {t.tensor_id: t for t in schedule.tensors}
    found: list[Violation] = []
    for tensor in chain.tensors:
        if declared.get(tensor.tensor_id) != tensor:
            found.append(
                TensorDiffers(
                    f"tensor '{tensor.tensor_id}' is not declared as in the chain",
                    tensor=tensor.tensor_id,
                )
            )
    known = {t.tensor_id for t in chain.tensors}
    found += [
        TensorDiffers(f"tensor '{name}' is not in the chain", tensor=name)
        for name in declared
        if name not in known
    ]
    for name, call in schedule.calls.items():
        if chain.calls.get(name) != call:
            found.append(CallDiffers(f"call '{name}' is not the chain's"))
    return found


def _task_violations(schedule: Schedule, chain: Chain) -> list[Violation]:
    found: list[Violation] = []
    recomputes: dict[str, Recompute] = {r.task.task_id: r for r in chain.recomputes}
    number = {task.task_id: i for i, task in enumerate(chain.tasks)}
    groups: set[str] = set()
    upcoming = 0
    for op in (op for op in schedule.ops if isinstance(op, Compute)):
        if op.task in number:
            at = number[op.task]
            if at < upcoming:
                found.append(
                    TaskUnexpected(
                        f"op '{op.op_id}' carries out task '{op.task}' again or after a later one",
                        (op.op_id,),
                    )
                )
                continue
            found += [_missing(chain.tasks[i], op) for i in range(upcoming, at)]
            upcoming = at + 1
            found += _operand_violations(op, chain.tasks[at])
        elif op.task in recomputes:
            recompute = recomputes[op.task]
            follows = chain.tasks[upcoming].task_id if upcoming < len(chain.tasks) else None
            if recompute.group in groups or recompute.before != follows:
                found.append(
                    TaskUnexpected(
                        f"op '{op.op_id}' recomputes '{op.task}' twice, beside another level, or "
                        f"not right before task '{recompute.before}'",
                        (op.op_id,),
                    )
                )
            groups.add(recompute.group)
            found += _operand_violations(op, recompute.task)
        else:
            found.append(
                TaskUnexpected(
                    f"op '{op.op_id}' carries out '{op.task}', which is no task of the chain",
                    (op.op_id,),
                )
            )
    return found + [_missing(task, None) for task in chain.tasks[upcoming:]]


def _missing(task: Task, op: Compute | None) -> Violation:
    where = f"before op '{op.op_id}'" if op else "at the end"
    return TaskMissing(
        f"task '{task.task_id}' is not carried out {where}", (op.op_id,) if op else ()
    )


def _operand_violations(op: Compute, task: Task) -> list[Violation]:
    found: list[Violation] = []
    if op.call != task.call:
        found.append(
            CallDiffers(
                f"op '{op.op_id}' calls '{op.call}', task '{task.task_id}' calls '{task.call}'",
                (op.op_id,),
            )
        )
    given = tuple(
        TaskOperand(
            name=o.name, tensor=o.tensor, version=o.version, mode=o.mode, num_parts=o.num_parts
        )
        for o in op.operands
    )
    if given != task.operands:
        wrong = next(
            (g for g, t in zip(given, task.operands, strict=False) if g != t),
            given[-1] if given else None,
        )
        found.append(
            OperandsDiffer(
                f"op '{op.op_id}' does not have the operands of task '{task.task_id}'"
                + (f", first at '{wrong.name}' ('{wrong.tensor}')" if wrong else ""),
                (op.op_id,),
                wrong.tensor if wrong else None,
            )
        )
    return found


def _host_violations(schedule: Schedule, chain: Chain) -> list[Violation]:
    feeds = [
        (op.tensor, op.version, op.source, op.index) for op in schedule.ops if isinstance(op, Feed)
    ]
    fetches = [(op.tensor, op.version, op.sink) for op in schedule.ops if isinstance(op, Fetch)]
    wanted_feeds = [(i.tensor, i.version, i.source, i.index) for i in chain.inputs]
    wanted_fetches = [(o.tensor, o.version, o.sink) for o in chain.outputs]
    found: list[Violation] = []
    for what, given, wanted in (
        ("fed", sorted(map(str, feeds)), sorted(map(str, wanted_feeds))),
        ("fetched", sorted(map(str, fetches)), sorted(map(str, wanted_fetches))),
    ):
        if given != wanted:
            different = sorted(set(given) ^ set(wanted)) or [
                item for item in given if given.count(item) > 1
            ]
            found.append(
                InputsDiffer(f"what is {what} differs from the chain, first at {different[0]}")
            )
    return found


def _carried_violations(schedule: Schedule, chain: Chain) -> list[Violation]:
    parts: dict[str, list[str]] = {}
    for tensor in chain.tensors:
        if tensor.parent is not None:
            parts.setdefault(tensor.parent, []).append(tensor.tensor_id)
    carried: set[str] = set()
    for item in schedule.carried:
        carried.update(parts.get(item.tensor, [item.tensor]))
    return [
        PersistentNotCarried(f"persistent tensor '{leaf}' is not carried", tensor=leaf)
        for root in chain.persistent
        for leaf in parts.get(root, [root])
        if leaf not in carried
    ]
