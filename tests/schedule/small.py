"""One hand-written chain of two tasks and a safe schedule for it, to damage on purpose.

`step` updates the weight and makes an activation in two parts; `head`, which may recompute the
activation first, reads it and makes a loss. The weight lives on the host; its copies in and out
cross the pass boundary.
"""

from typing import Any

from tests.helpers.sketches import tensor
from twinstream.schedule.chain import Chain, Input, Output, Recompute, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import (
    Compute,
    Copy,
    Feed,
    Fetch,
    KernelCall,
    Label,
    Operand,
    Stream,
    TaskOperand,
)
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Slot
from twinstream.schedule.workload import MachineRef, ModelRef, Workload

LABEL = Label(kind="task")
WORKLOAD = Workload(seq_len=8, chunk_tokens=8, chunks_per_round=1, rounds_per_step=1)
MODEL = ModelRef(name="small", content_hash="0", spec={})
CALL = KernelCall(
    kernel="small/eager",
    attributes={"causal": True},
    cost=(Work(unit="matmul", shape=(1, 1, 1), flops=2, hbm_bytes=6, launches=1),),
)
COMPUTE, H2D, D2H = Stream(queue="compute"), Stream(queue="h2d"), Stream(queue="d2h")
FEEDS, FETCHES = Stream(queue="feeds"), Stream(queue="fetches")


TENSORS = (
    tensor("weight", 512),
    tensor("hidden", 512),
    tensor("hidden.0", 256, parent="hidden"),
    tensor("hidden.1", 200, parent="hidden", offset=256),
    tensor("tokens", 64),
    tensor("loss", 4),
)
SLOTS = (
    Slot(slot_id="device.weight", tier=DEVICE, offset_bytes=0, size_bytes=512),
    Slot(slot_id="device.hidden", tier=DEVICE, offset_bytes=512, size_bytes=512),
    Slot(slot_id="device.tokens", tier=DEVICE, offset_bytes=1024, size_bytes=64),
    Slot(slot_id="device.loss", tier=DEVICE, offset_bytes=1280, size_bytes=4),
    Slot(slot_id="host.weight", tier=HOST, offset_bytes=0, size_bytes=512),
    Slot(slot_id="host.other", tier=HOST, offset_bytes=256, size_bytes=512),
)
STEP = (
    TaskOperand(name="tokens", tensor="tokens", version=1, mode="read"),
    TaskOperand(name="weight", tensor="weight", version=0, mode="update"),
    TaskOperand(name="out", tensor="hidden", version=1, mode="write"),
)
REMAKE = (TaskOperand(name="out", tensor="hidden", version=1, mode="write"),)
HEAD = (
    TaskOperand(name="hidden", tensor="hidden", version=1, mode="read", num_parts=1),
    TaskOperand(name="loss", tensor="loss", version=1, mode="write"),
)


def _task(name: str, operands: tuple[TaskOperand, ...]) -> Task:
    return Task(task_id=name, call="call", operands=operands, label=LABEL)


CHAIN = Chain(
    tensors=TENSORS,
    calls={"call": CALL},
    tasks=(_task("step", STEP), _task("head", HEAD)),
    recomputes=(
        Recompute(task=_task("remake", REMAKE), before="head", group="hidden"),
        Recompute(task=_task("remake-other", REMAKE), before="head", group="hidden"),
    ),
    inputs=(Input(tensor="tokens", version=1, source="text", index=0),),
    outputs=(Output(tensor="loss", version=1, sink="loss"),),
    persistent=("weight",),
    round_starts=(0,),
    workload=WORKLOAD,
    model=MODEL,
    recipe={},
    model_flops=2,
)


def compute(task: str, operands: tuple[TaskOperand, ...], **fields: Any) -> Compute:
    """The op of a task, every operand in the device slot of its name."""
    placed = tuple(Operand(**o.model_dump(), slot=f"device.{o.tensor}") for o in operands)
    return Compute(
        op_id=f"op-{task}", stream=COMPUTE, task=task, call="call", operands=placed, label=LABEL,
        **fields,
    )  # fmt: skip


def copy(name: str, stream: Stream, version: int, route: tuple[str, str], **fields: Any) -> Copy:
    return Copy(
        op_id=name, stream=stream, tensor="weight", version=version, source=route[0],
        destination=route[1], **fields,
    )  # fmt: skip


FEED = Feed(
    op_id="feed", stream=FEEDS, tensor="tokens", version=1, slot="device.tokens",
    source="text", index=0, waits_previous=("op-step",),
)  # fmt: skip
FETCH = Fetch(
    op_id="fetch", stream=FETCHES, tensor="loss", version=1, slot="device.loss", sink="loss",
    waits=("op-head",),
)  # fmt: skip
TO_DEVICE, TO_HOST = ("host.weight", "device.weight"), ("device.weight", "host.weight")
SCHEDULE = RankSchedule(
    tensors=TENSORS,
    slots=SLOTS,
    calls={"call": CALL},
    ops=(
        FEED,
        copy("load", H2D, 0, TO_DEVICE, waits_previous=("store",)),
        compute("step", STEP, waits=("feed", "load")),
        copy("store", D2H, 1, TO_HOST, waits=("op-step",)),
        compute("remake", REMAKE),
        compute("head", HEAD, waits_previous=("fetch",)),
        FETCH,
    ),
    carried=(Carried(tensor="weight", slot="host.weight"),),
    caps=Caps(device_bytes=1284, host_bytes=768),
    workload=WORKLOAD,
    model=MODEL,
    recipe={},
    model_flops=2,
    machine=MachineRef(name="small", content_hash="0"),
    policy="by hand",
)


def with_op(op_id: str, **update: Any) -> RankSchedule:
    """SCHEDULE with other fields in one op."""
    ops = tuple(op.model_copy(update=update) if op.op_id == op_id else op for op in SCHEDULE.ops)
    return SCHEDULE.model_copy(update={"ops": ops})


def with_operand(op_id: str, number: int, **update: Any) -> RankSchedule:
    """SCHEDULE with other fields in one operand of a compute op."""
    [op] = [op for op in SCHEDULE.ops if op.op_id == op_id]
    assert isinstance(op, Compute)
    operands = list(op.operands)
    operands[number] = operands[number].model_copy(update=update)
    return with_op(op_id, operands=tuple(operands))


def with_tensor(tensor_id: str, **update: Any) -> RankSchedule:
    tensors = tuple(
        t.model_copy(update=update) if t.tensor_id == tensor_id else t for t in SCHEDULE.tensors
    )
    return SCHEDULE.model_copy(update={"tensors": tensors})


def with_slot(slot_id: str, **update: Any) -> RankSchedule:
    slots = tuple(
        s.model_copy(update=update) if s.slot_id == slot_id else s for s in SCHEDULE.slots
    )
    return SCHEDULE.model_copy(update={"slots": slots})


def without(op_id: str) -> RankSchedule:
    """SCHEDULE without an op, and without the waits for it."""
    ops = tuple(
        op.model_copy(
            update={
                "waits": tuple(w for w in op.waits if w != op_id),
                "waits_previous": tuple(w for w in op.waits_previous if w != op_id),
            }
        )
        for op in SCHEDULE.ops
        if op.op_id != op_id
    )
    return SCHEDULE.model_copy(update={"ops": ops})
