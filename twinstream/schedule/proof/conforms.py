"""Prove that a schedule computes exactly what a chain says: nothing dropped, nothing changed."""

from collections import Counter
from collections.abc import Iterable, Iterator

from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import require
from twinstream.schedule.ops import Compute, KernelCall, Stream, TaskOperand
from twinstream.schedule.proof.violations import (
    CallDiffers,
    CarriedNotPersistent,
    ConsumedDiffers,
    InputsDiffer,
    OperandsDiffer,
    PersistentNotCarried,
    StreamsDiffer,
    TaskMissing,
    TaskUnexpected,
    TensorDiffers,
    UnsafeSchedule,
    Violation,
    WorkDiffers,
)
from twinstream.schedule.tensors import Tensor


def conforms(schedule: RankSchedule, chain: Chain, *, of_mesh: bool = False) -> list[Violation]:
    """Return all differences between what the schedule computes and the chain; empty is a proof.

    Args:
        of_mesh: it is a rank's, whose exchanges are held against the chain elsewhere.
    """
    require("schedule", schedule, RankSchedule)
    require("chain", chain, Chain)
    return [
        *_tensor_violations(schedule, chain),
        *_task_violations(schedule, chain),
        *(() if of_mesh else _exchange_violations(schedule)),
        *_stream_violations(schedule),
        *_work_violations(schedule, chain),
        *_host_violations(schedule, chain),
        *_carried_violations(schedule, chain),
    ]


def require_conforming(schedule: RankSchedule, chain: Chain) -> None:
    """Raise UnsafeSchedule unless `conforms` finds nothing."""
    if found := conforms(schedule, chain):
        raise UnsafeSchedule(found)


def _tensor_violations(schedule: RankSchedule, chain: Chain) -> Iterator[Violation]:
    declared = {t.tensor_id: t for t in schedule.tensors}
    known = {t.tensor_id for t in chain.tensors}
    for tensor in chain.tensors:
        found = declared.get(name := tensor.tensor_id)
        if found != tensor and (found is None or found != _flat_as_before(tensor)):
            yield TensorDiffers(f"tensor '{name}' is not declared as in the chain", tensor=name)
    for name in declared:
        if name not in known:
            yield TensorDiffers(f"tensor '{name}' is not in the chain", tensor=name)
    for name, call in schedule.calls.items():
        expected = chain.calls.get(name)
        if call != expected and (expected is None or call != _as_before(expected)):
            yield CallDiffers(f"call '{name}' is not the chain's")


def _flat_as_before(tensor: Tensor) -> Tensor:
    """The tensor as schedules have it that were written when flat shapes were in bytes."""
    if len(tensor.shape) != 1:
        return tensor
    return tensor.model_copy(update={"shape": (tensor.size_bytes,)})


def _as_before(call: KernelCall) -> KernelCall:
    """The call as schedules have it that were written before work named its implementation."""
    cost = tuple(work.model_copy(update={"implementation": None}) for work in call.cost)
    return call.model_copy(update={"cost": cost})


def _task_violations(schedule: RankSchedule, chain: Chain) -> Iterator[Violation]:
    number = {task.task_id: i for i, task in enumerate(chain.tasks)}
    recomputes = {r.task.task_id: r for r in chain.recomputes}
    groups: set[str] = set()
    upcoming = 0
    for op in (op for op in schedule.ops if op.kind == "compute"):
        at, recompute = number.get(op.task), recomputes.get(op.task)
        if at is not None and at >= upcoming:
            yield from (_missing(task, op) for task in chain.tasks[upcoming:at])
            upcoming = at + 1
            yield from _operand_violations(op, chain.tasks[at])
        elif at is not None:
            yield _unexpected(op, f"task '{op.task}' again or after a later one")
        elif recompute is not None:
            next_task = chain.tasks[upcoming].task_id if upcoming < len(chain.tasks) else None
            if recompute.before != next_task:
                why = f"recompute '{op.task}', but not right before task '{recompute.before}'"
                yield _unexpected(op, why)
            elif recompute.group in groups:
                why = f"recompute '{op.task}', though one of group '{recompute.group}' has run"
                yield _unexpected(op, why)
            groups.add(recompute.group)
            yield from _operand_violations(op, recompute.task)
        else:
            yield _unexpected(op, f"'{op.task}', which is no task of the chain")
    yield from (_missing(task, None) for task in chain.tasks[upcoming:])


def _exchange_violations(schedule: RankSchedule) -> Iterator[Violation]:
    """One device has nobody to exchange anything with."""
    for op in schedule.ops:
        if op.kind == "communicate":
            what = f"an exchange ({op.collective})"
            told = f"op '{op.op_id}' is {what}, which is no task of the chain"
            yield TaskUnexpected(told, (op.op_id,))


def _stream_violations(schedule: RankSchedule) -> Iterator[Violation]:
    """The order of issue is the order of tasks only on one stream."""
    first: dict[str, dict[Stream, str]] = {}
    for op in schedule.ops:
        if op.kind == "compute" and (call := schedule.calls.get(op.call)) is not None:
            first.setdefault(call.processor, {}).setdefault(op.stream, op.op_id)
    for processor, ops in first.items():
        if len(ops) > 1:
            where = ", ".join(f"op '{op_id}' on {stream}" for stream, op_id in ops.items())
            text = f"the {processor} computes on {len(ops)} streams: {where}"
            yield StreamsDiffer(text, tuple(ops.values()))


def _work_violations(schedule: RankSchedule, chain: Chain) -> Iterator[Violation]:
    if schedule.model_flops != chain.model_flops:
        yield WorkDiffers(
            f"model_flops is {schedule.model_flops:,}, the chain's is {chain.model_flops:,}"
        )
    if schedule.caps.library_bytes < chain.library_bytes:
        yield WorkDiffers(
            f"caps.library_bytes is {schedule.caps.library_bytes:,}, kernels take up to "
            f"{chain.library_bytes:,} beside the arena"
        )


def _unexpected(op: Compute, what: str) -> Violation:
    return TaskUnexpected(f"op '{op.op_id}' carries out {what}", (op.op_id,))


def _missing(task: Task, op: Compute | None) -> Violation:
    where = f"before op '{op.op_id}'" if op else "at the end"
    text = f"task '{task.task_id}' is not carried out {where}"
    return TaskMissing(text, (op.op_id,) if op else ())


def _operand_violations(op: Compute, task: Task) -> Iterator[Violation]:
    if op.call != task.call:
        text = f"op '{op.op_id}' calls '{op.call}', task '{task.task_id}' calls '{task.call}'"
        yield CallDiffers(text, (op.op_id,))
    for given, wanted in zip(op.operands, task.operands, strict=False):
        if _what(given) != _what(wanted):
            text = (
                f"op '{op.op_id}' has operand {_text(given)} in slot '{given.slot}', where "
                f"task '{task.task_id}' has {_text(wanted)}"
            )
            yield OperandsDiffer(text, (op.op_id,), given.tensor, given.slot)
    if len(op.operands) != len(task.operands):
        text = (
            f"op '{op.op_id}' has {len(op.operands)} operands, task '{task.task_id}' has "
            f"{len(task.operands)}"
        )
        yield OperandsDiffer(text, (op.op_id,))


def _what(operand: TaskOperand) -> tuple[str, str, int, str, int | None]:
    return operand.name, operand.tensor, operand.version, operand.mode, operand.num_parts


def _text(operand: TaskOperand) -> str:
    parts = "" if operand.num_parts is None else f"the first {operand.num_parts} parts of "
    return (
        f"'{operand.name}' ({operand.mode} version {operand.version} of {parts}'{operand.tensor}')"
    )


def _host_violations(schedule: RankSchedule, chain: Chain) -> Iterator[Violation]:
    left = Counter(
        [(i.tensor, i.version, f"fed item {i.index} of '{i.source}'") for i in chain.inputs]
        + [(o.tensor, o.version, f"fetched as '{o.sink}'") for o in chain.outputs]
    )
    for op in schedule.ops:
        if op.kind == "feed":
            key = (op.tensor, op.version, f"fed item {op.index} of '{op.source}'")
        elif op.kind == "fetch":
            key = (op.tensor, op.version, f"fetched as '{op.sink}'")
        else:
            continue
        if left[key]:
            left[key] -= 1
            continue
        text = (
            f"op '{op.op_id}': version {op.version} of '{op.tensor}' in slot '{op.slot}' is "
            f"{key[2]}, which is not in the chain or done twice"
        )
        yield InputsDiffer(text, (op.op_id,), op.tensor, op.slot)
    for (tensor, version, how), count in left.items():
        if count:
            missing = f"version {version} of '{tensor}' is never {how}"
            yield InputsDiffer(missing, tensor=tensor)


def _carried_violations(schedule: RankSchedule, chain: Chain) -> Iterator[Violation]:
    parts: dict[str, list[str]] = {}
    for tensor in chain.tensors:
        if tensor.parent is not None:
            parts.setdefault(tensor.parent, []).append(tensor.tensor_id)

    def leaves(names: Iterable[str]) -> dict[str, None]:
        return {leaf: None for name in names for leaf in parts.get(name, [name])}

    carried, persistent = leaves(i.tensor for i in schedule.carried), leaves(chain.persistent)
    for leaf in persistent:
        if leaf not in carried:
            yield PersistentNotCarried(f"persistent tensor '{leaf}' is not carried", tensor=leaf)
    consumed, wanted = leaves(i.tensor for i in schedule.consumed), leaves(chain.consumed)
    for leaf in sorted(consumed.keys() ^ wanted.keys()):
        text = f"'{leaf}' is consumed by the {'chain' if leaf in wanted else 'schedule'} alone"
        yield ConsumedDiffers(text, tensor=leaf)
    for leaf in sorted(carried.keys() - persistent.keys()):
        text = (
            f"tensor '{leaf}' is carried, and no state holds it before the first pass: only "
            "persistent tensors (parameters, optimizer state) are"
        )
        yield CarriedNotPersistent(text, tensor=leaf)
