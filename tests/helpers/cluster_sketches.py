"""Hand-drawn cluster schedules: classes of ranks whose ops communicate, and their timelines."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.helpers.sketches import Spans, sketch, timeline
from twinstream.schedule.document import Axis, Exchange, Mesh, RankClass, Schedule
from twinstream.schedule.ops import Communicate, Label, Op, Operand, Stream
from twinstream.schedule.timeline import Provenance, Timeline
from twinstream.schedule.workload import MachineRef

Sides = Sequence[tuple[str, str]]
USE = Operand(name="x", tensor="x", version=0, mode="read", slot="device.x")


def talk(
    op_id: str, queue: str, waits: tuple[str, ...] = (), previous: tuple[str, ...] = (),
    **fields: Any,
) -> Communicate:  # fmt: skip
    """A collective along the axis that the queue is named after; `send` and `recv` along pp."""
    family = queue.partition(".")[0]
    known: dict[str, Any] = {"collective": "all_reduce", "axes": (family,)}
    if family in ("send", "recv"):
        known = {"collective": family, "axes": ("pp",), "shift": 1 if family == "send" else -1}
    return Communicate(
        op_id=op_id, stream=Stream(queue=queue), waits=waits, waits_previous=previous,
        operands=(USE,), label=Label(kind=family), **{"sequence": 0, **known, **fields},
    )  # fmt: skip


def cluster(classes: Mapping[str, Sequence[Op]], *exchanges: Sides) -> Schedule:
    """Stages of a pipeline with two ranks each, by name; class `n` has cell n of pp."""
    pp = Axis(name="pp", size=len(classes))
    return Schedule(
        mesh=Mesh(axes=(pp, Axis(name="tp", size=2)), ranks_per_node=8),
        classes=tuple(
            RankClass(name=name, schedule=name, cells={"pp": (number,)})
            for number, name in enumerate(classes)
        ),
        schedules={name: sketch(ops) for name, ops in classes.items()},
        order=tuple(Exchange(sides=tuple(sides)) for sides in exchanges),
        model={}, layout={}, seq_len=8, global_batch=1, model_flops=1,
        machine=MachineRef(name="h100_dgx", content_hash="0"),
    )  # fmt: skip


def cluster_timeline(
    schedule: Schedule, passes: Mapping[str, Sequence[Spans]], step_ns: float = 1.0
) -> Timeline:
    """Passes of each class as (start, end) of each op."""
    return Timeline(
        classes={
            one.name: timeline(schedule.of(one).ops, *passes[one.name], step_ns=step_ns)
            for one in schedule.classes
        },
        step_ns=step_ns, cold_ns=1,
        provenance=Provenance(kind="simulated", where="by hand"),
    )  # fmt: skip
