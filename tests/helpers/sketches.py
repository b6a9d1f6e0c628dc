"""Hand-drawn schedules: ops with waits on named queues. Times matter, what is computed does not."""

from collections.abc import Sequence
from typing import Any

from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, KernelCall, Label, Op, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Slot, Tensor
from twinstream.schedule.workload import MachineRef, ModelRef, Workload

Waits = tuple[str, ...]
KIB = 1024
CALL = KernelCall(kernel="nothing/eager", attributes={}, cost=())


def op(op_id: str, queue: str, waits: Waits = (), waits_previous: Waits = ()) -> Op:
    """A task without operands on a compute queue, a copy of `x` on the others (d2h: out)."""
    stream = Stream(queue=queue)
    if queue.startswith("compute"):
        return Compute(
            op_id=op_id, stream=stream, waits=waits, waits_previous=waits_previous, task=op_id,
            call="call", operands=(), label=Label(kind="task"),
        )  # fmt: skip
    ends = ("device.x", "host.x") if queue.startswith("d2h") else ("host.x", "device.x")
    return Copy(
        op_id=op_id, stream=stream, waits=waits, waits_previous=waits_previous, tensor="x",
        version=0, source=ends[0], destination=ends[1],
    )  # fmt: skip


def feed(op_id: str, waits: Waits = (), waits_previous: Waits = ()) -> Feed:
    """The host fills `x`."""
    return Feed(
        op_id=op_id, stream=Stream(queue="host"), waits=waits, waits_previous=waits_previous,
        tensor="x", version=1, slot="host.x", source="tokens", index=0,
    )  # fmt: skip


def fetch(op_id: str, waits: Waits = (), waits_previous: Waits = ()) -> Fetch:
    """The host takes `x`."""
    return Fetch(
        op_id=op_id, stream=Stream(queue="host"), waits=waits, waits_previous=waits_previous,
        tensor="x", version=0, slot="host.x", sink="loss",
    )  # fmt: skip


def sketch(ops: Sequence[Op], **fields: Any) -> Schedule:
    """A schedule of these ops; by default over one tensor `x` of 1 KiB with a slot in each tier."""
    x = Tensor(tensor_id="x", size_bytes=KIB, role="activation", dtype="uint8", shape=(KIB,))
    slots = (
        Slot(slot_id="device.x", tier=DEVICE, offset_bytes=0, size_bytes=KIB),
        Slot(slot_id="host.x", tier=HOST, offset_bytes=0, size_bytes=KIB),
    )
    known: dict[str, Any] = {
        "tensors": (x,),
        "slots": slots,
        "calls": {"call": CALL},
        "carried": (),
        "caps": Caps(),
        "workload": Workload(seq_len=8, chunk_tokens=8, chunks_per_round=1, rounds_per_step=1),
        "model": ModelRef(name="sketch", content_hash="0", spec={}),
        "recipe": {},
        "model_flops": 1,
        "machine": MachineRef(name="sketch", content_hash="0"),
        "policy": "by hand",
    }
    return Schedule(ops=tuple(ops), **{**known, **fields})
