"""Headline figures of a schedule and a timeline."""

from pydantic import NonNegativeInt

from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.schema import Machine, is_compute_unit
from twinstream.measures.residence import copied_sizes
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import require
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.timeline import Timeline


class Summary(Node):
    """What a step costs and yields.

    `mfu` and `hfu` are shares of the machine's peak for the model's dtype; hfu counts all matmul
    and attention FLOPs executed, recomputed ones too. Peaks are what the process takes: arenas,
    and on the device the reserve. `h2d_bytes` and `d2h_bytes` are per step.
    `recompute_fraction` is the share of executed FLOPs that recompute tasks redo.
    `lower_bound_s` is that of the machine the schedule was planned for, `gap` how far above it
    the step is; `gap_family` is how far above the least bound of all ways to cut the step into
    rounds and chunks, where that was asked. They are None on another machine.
    """

    step_time_s: float
    cold_step_time_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    device_peak_bytes: NonNegativeInt
    host_peak_bytes: NonNegativeInt
    h2d_bytes: NonNegativeInt
    d2h_bytes: NonNegativeInt
    recompute_fraction: float
    lower_bound_s: float | None = None
    gap: float | None = None
    gap_family: float | None = None
    plan_seconds: float | None = None


def summarize(
    schedule: Schedule, timeline: Timeline, machine: Machine, plan_seconds: float | None = None
) -> Summary:
    """Headline figures of a timeline, predicted or measured, of a schedule.

    Args:
        machine: whose peak MFU and HFU are shares of.
        plan_seconds: how long planning took, where that is known.

    Raises:
        MissingNumberError: the machine's profile lacks the peak of the model's dtype.
    """
    require("schedule", schedule, Schedule)
    require("timeline", timeline, Timeline)
    require("machine", machine, Machine)
    step_s = timeline.step_ns / 1e9
    executed, recomputed = executed_flops(schedule)
    peak = machine.number(PEAK_OF_DTYPE[str(schedule.model.spec["dtype"])])
    moved = copied_bytes(schedule)
    bound = schedule.bound if schedule.machine.content_hash == machine.content_hash else None
    return Summary(
        step_time_s=step_s,
        cold_step_time_s=timeline.cold_ns / 1e9,
        tokens_per_s=schedule.workload.tokens_per_step / step_s,
        mfu=schedule.model_flops / step_s / peak,
        hfu=executed / step_s / peak,
        device_peak_bytes=arena_bytes(schedule, DEVICE) + schedule.caps.outside_arena_bytes,
        host_peak_bytes=arena_bytes(schedule, HOST),
        h2d_bytes=sum(size for queue, size in moved.items() if queue.startswith("h2d")),
        d2h_bytes=sum(size for queue, size in moved.items() if queue.startswith("d2h")),
        recompute_fraction=recomputed / executed,
        lower_bound_s=bound.step_s if bound else None,
        gap=step_s / bound.step_s - 1.0 if bound and bound.step_s else None,
        gap_family=step_s / bound.family_step_s - 1.0 if bound and bound.family_step_s else None,
        plan_seconds=plan_seconds,
    )


def rate_text(per_s: float) -> str:
    """Tokens a second for people: whole ones, two digits where there are few.

    >>> rate_text(11234.5), rate_text(0.0123)
    ('11,234', '0.012')
    """
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def executed_flops(schedule: Schedule) -> tuple[int, int]:
    """(matmul and attention FLOPs of one step, those of them in recompute tasks)."""
    per_call = {
        name: sum(work.flops for work in call.cost if is_compute_unit(work.unit))
        for name, call in schedule.calls.items()
    }
    computes = [op for op in schedule.ops if isinstance(op, Compute)]
    again = sum(per_call[op.call] for op in computes if op.label.kind == "block_recompute")
    return sum(per_call[op.call] for op in computes), again


def copied_bytes(schedule: Schedule) -> dict[str, int]:
    """Bytes that copies move in one step, by queue."""
    moved: dict[str, int] = {}
    for op, size_bytes in copied_sizes(schedule):
        moved[op.stream.queue] = moved.get(op.stream.queue, 0) + size_bytes
    return moved
