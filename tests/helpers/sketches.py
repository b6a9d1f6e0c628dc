"""Hand-drawn schedules: ops with waits on named queues. Times matter, what is computed does not."""

from collections.abc import Sequence
from typing import Any

from twinstream.models.presets import load_preset
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, KernelCall, Label, Op, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Role, Slot, Tensor
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline
from twinstream.schedule.workload import MachineRef, Workload

Waits = tuple[str, ...]
Spans = Sequence[tuple[int, int]]
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


def tensor(
    name: str, size: int, role: Role = "activation", parent: str | None = None, offset: int = 0
) -> Tensor:
    return Tensor(
        tensor_id=name, size_bytes=size, role=role, dtype="uint8", shape=(size,), parent=parent,
        offset_bytes=offset,
    )  # fmt: skip


def sketch(ops: Sequence[Op], x_bytes: int = KIB, **fields: Any) -> RankSchedule:
    """A schedule of these ops; by default over one tensor `x` with a slot in each tier."""
    slots = (
        Slot(slot_id="device.x", tier=DEVICE, offset_bytes=0, size_bytes=x_bytes),
        Slot(slot_id="host.x", tier=HOST, offset_bytes=0, size_bytes=x_bytes),
    )
    known: dict[str, Any] = {
        "tensors": (tensor("x", x_bytes),),
        "slots": slots,
        "calls": {"call": CALL},
        "carried": (),
        "caps": Caps(),
        "workload": Workload(seq_len=8, chunk_tokens=8, chunks_per_round=1, rounds_per_step=1),
        "model": load_preset("tiny").ref(),
        "recipe": {},
        "model_flops": 1,
        "machine": MachineRef(name="sketch", content_hash="0"),
        "policy": "by hand",
    }
    return RankSchedule(ops=tuple(ops), **{**known, **fields})


def timeline(ops: Sequence[Op], *passes: Spans, step_ns: float = 1.0) -> RankTimeline:
    """Passes as (start, end) of each op; the first is the cold one, too."""
    found = tuple(
        PassSpans(start_ns=tuple(s for s, _ in spans), end_ns=tuple(e for _, e in spans))
        for spans in passes
    )
    return RankTimeline(
        op_ids=tuple(o.op_id for o in ops), passes=found, cold=found[0], step_ns=step_ns,
        provenance=Provenance(kind="simulated", where="by hand"),
    )  # fmt: skip
