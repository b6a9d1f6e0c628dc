"""One hand-written cluster, safe, to damage on purpose: two stages, each on two replicas.

The first stage computes `x` and sends it, the second receives it and sends `dx` back; each sums its
gradient `g` over the replicas and updates with it.
"""

from collections.abc import Iterable
from typing import Any

from tests.helpers.sketches import tensor
from tests.schedule.cluster.small_clusters import LABEL, cluster_of, mesh_of, schedule_of
from twinstream.schedule.document import RankClass, RankSchedule, Schedule
from twinstream.schedule.ops import Communicate, Compute, Copy, Mode, Op, Operand, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Slot

MESH = mesh_of(pp=2, dp=2)
NAMES = ("w", "x", "dx", "g", "shard")
SIZES = {"w": 64, "x": 64, "dx": 64, "g": 256, "shard": 128}
TENSORS = tuple(tensor(name, SIZES[name]) for name in NAMES)
SLOTS = (
    Slot(slot_id="host.w", tier=HOST, offset_bytes=0, size_bytes=64),
    *(
        Slot(slot_id=f"device.{name}", tier=DEVICE, offset_bytes=256 * i, size_bytes=256)
        for i, name in enumerate(NAMES)
    ),
)


def operand(name: str, mode: Mode, version: int = 1) -> Operand:
    return Operand(name=name, tensor=name, version=version, mode=mode, slot=f"device.{name}")


def compute(op_id: str, *operands: Operand) -> Compute:
    return Compute(
        op_id=op_id, stream=Stream(queue="compute"), task=op_id, call="call", operands=operands,
        label=LABEL,
    )  # fmt: skip


def say(
    op_id: str, collective: str, axis: str, *operands: Operand, shift: int = 0, **fields: Any
) -> Communicate:
    """In the queue of its axis, the first on its communicator; a message in one of its own."""
    queue = fields.pop("queue", collective if shift else axis)
    return Communicate.model_validate({
        "op_id": op_id, "stream": Stream(queue=queue), "collective": collective, "axes": (axis,),
        "shift": shift, "sequence": 0, "operands": operands, "label": LABEL, **fields,
    })  # fmt: skip


FIRST: tuple[Op, ...] = (
    compute("forward", operand("x", "write")),
    say("give", "send", "pp", operand("x", "read"), shift=1),
    say("take", "recv", "pp", operand("dx", "write"), shift=1),
    compute("backward", operand("dx", "read"), operand("g", "write")),
    say("sum", "all_reduce", "dp", operand("g", "update")),
)
SECOND: tuple[Op, ...] = (
    say("take", "recv", "pp", operand("x", "write"), shift=-1),
    compute("backward", operand("x", "read"), operand("dx", "write"), operand("g", "write")),
    say("give", "send", "pp", operand("dx", "read"), shift=-1),
    say("sum", "all_reduce", "dp", operand("g", "update")),
)
ORDER = (
    (("first", "give"), ("second", "take")),
    (("second", "give"), ("first", "take")),
    (("first", "sum"),),
    (("second", "sum"),),
)
STAGES = {"first": {"pp": (0,)}, "second": {"pp": (1,)}}


def schedule(ops: Iterable[Op]) -> RankSchedule:
    """The ops, and the update of the weight, which is carried on the host."""
    route = {"source": "host.w", "destination": "device.w"}
    back = {"source": "device.w", "destination": "host.w"}
    load = Copy(op_id="load", stream=Stream(queue="h2d"), tensor="w", version=0, **route)
    store = Copy(op_id="store", stream=Stream(queue="d2h"), tensor="w", version=1, **back)
    step = compute("step", operand("w", "update", 0))
    return schedule_of([load, *ops, step, store], TENSORS, SLOTS)


def cluster(
    first: Iterable[Op] = FIRST,
    second: Iterable[Op] = SECOND,
    order: Iterable[Iterable[tuple[str, str]]] = ORDER,
    cells: dict[str, dict[str, tuple[int, ...]]] | None = None,
) -> Schedule:
    """Of the two stages, or of classes with these cells; those named `first...` run `first`."""
    classes = [
        RankClass(name=name, schedule=name.split(".")[0], cells=cell)
        for name, cell in (cells or STAGES).items()
    ]
    schedules = {"first": schedule(first), "second": schedule(second)}
    return cluster_of(MESH, classes, schedules, order)


def changed(ops: tuple[Op, ...], op_id: str, **update: Any) -> tuple[Op, ...]:
    """The ops with other fields in one of them."""
    return tuple(op.model_copy(update=update) if op.op_id == op_id else op for op in ops)
