"""Headline figures of a schedule and a timeline of all ranks of a mesh, or of one device."""

from collections.abc import Mapping
from typing import Literal

from pydantic import NonNegativeInt

from twinstream.clusters.conforms import is_executable
from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.schema import Machine, is_compute_unit
from twinstream.measures.residence import copied_sizes, moved_bytes
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of
from twinstream.schedule.analysis.comparison import core_share_of
from twinstream.schedule.analysis.idle import ExposedTime, exposed_times, mean_fractions
from twinstream.schedule.analysis.occupancy import memory_over_time, slot_bytes_by_role
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.errors import require
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import rate_text as rate_text
from twinstream.schedule.tensors import DEVICE, HOST, Role
from twinstream.schedule.timeline import PassSpans, Timeline

RESERVE, ARENA = "reserve", "arena"
_NARROW = ("fp4", "fp8")


class Summary(Node):
    """The cost and yield of a step: time, rates, memory, traffic, and how sure they are.

    `mfu` and `hfu` are shares of the peak of all devices, in the narrowest dtype of matrix
    products; hfu counts all matmul and attention FLOPs executed, recomputed ones too. Peaks are
    what the process of the rank that takes most takes: arenas, and on the device the reserve.
    `h2d_bytes` and `d2h_bytes` are per step, of the rank that copies most. `recompute_fraction` is
    the share of executed FLOPs that recompute tasks redo.
    `lower_bound_s` is that of the machine that one device's schedule was planned for, `gap` how far
    above it the step is; `gap_family` is how far above the least bound of all ways to cut the step
    into rounds and chunks, where that was asked. They are None on another machine.

    `memory_bytes` is, by class of ranks, a rank's device memory by role of tensor (`arena`: what
    is not alive at its fullest moment), and the `reserve` of context and libraries; `device_bytes`
    is what a device has, or its cap (None: neither is known). `host_bytes` is a rank's host arena.
    `exposed` has where the step of each class goes, `mean_fraction` its share by cause, mean over
    ranks, `compute` among them. `uncertainty` is how far off predicted times and rates may be;
    None of what was measured. `core_share` is the share of a measured time in which kernels had a
    core, where others were at it: errors are of that time.
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
    num_gpus: int
    device: Literal["cuda", "cpu"]
    tokens_per_step: int
    memory_bytes: dict[str, dict[str, NonNegativeInt]]
    device_bytes: NonNegativeInt | None
    host_bytes: dict[str, NonNegativeInt]
    exposed: tuple[ExposedTime, ...]
    mean_fraction: dict[str, float]
    uncertainty: Uncertainty | None
    lower_bound_s: float | None = None
    gap: float | None = None
    gap_family: float | None = None
    plan_seconds: float | None = None
    core_share: float = 1.0

    @property
    def devices(self) -> str:
        """Return the word for the ranks: GPUs, or ranks where they are processes on CPUs."""
        return "GPUs" if self.device == "cuda" else "ranks"

    @property
    def counted(self) -> str:
        """Return the number of devices with their word, as "8 GPUs"."""
        return (
            f"{self.num_gpus:,} {self.devices}" if self.num_gpus > 1 else f"1 {self.devices[:-1]}"
        )

    @property
    def fullest(self) -> str:
        """Return the name of the class of ranks that takes most device memory."""
        return max(self.memory_bytes, key=lambda name: sum(self.memory_bytes[name].values()))

    @property
    def missing_bytes(self) -> int:
        """Return the bytes by which the fullest class exceeds a device; 0 if it fits."""
        if self.device_bytes is None:
            return 0
        return max(0, sum(self.memory_bytes[self.fullest].values()) - self.device_bytes)


def summarize(
    schedule: Schedule,
    timeline: Timeline,
    machine: Machine,
    plan_seconds: float | None = None,
) -> Summary:
    """Headline figures of a timeline, predicted or measured, of a schedule.

    Args:
        machine: whose peak MFU and HFU are shares of; of a mesh the profile of a node.
        plan_seconds: how long planning took, where that is known.

    Raises:
        TimelineMismatch: the timeline is not of this schedule.
        MissingNumberError: the machine's profile lacks the peak of the model's dtype.
    """
    require("schedule", schedule, Schedule)
    require("timeline", timeline, Timeline)
    require("machine", machine, Machine)
    exposed = exposed_times(schedule, timeline)
    step_s, tokens = timeline.step_ns / 1e9, schedule.tokens_per_step
    peak = schedule.mesh.size * step_s * machine.number(PEAK_OF_DTYPE[matmul_dtype(schedule)])
    executed, recomputed = _executed_flops(schedule)
    memory = _memory_bytes(schedule, timeline, machine)
    host = {one.name: arena_bytes(schedule.of(one), HOST) for one in schedule.classes}
    moved = [moved_bytes(part) for part in schedule.schedules.values()]
    same = schedule.machine.content_hash == machine.content_hash
    bound = schedule.bound if same and schedule.is_one_device else None
    return Summary(
        step_time_s=step_s,
        cold_step_time_s=timeline.cold_ns / 1e9,
        tokens_per_s=tokens / step_s,
        mfu=schedule.model_flops / peak,
        hfu=executed / peak,
        device_peak_bytes=max(sum(sizes.values()) for sizes in memory.values()),
        host_peak_bytes=max(host.values()),
        h2d_bytes=max(_of_direction(sizes, "h2d") for sizes in moved),
        d2h_bytes=max(_of_direction(sizes, "d2h") for sizes in moved),
        recompute_fraction=recomputed / executed,
        num_gpus=schedule.mesh.size,
        device=machine.device,
        tokens_per_step=tokens,
        memory_bytes=memory,
        host_bytes=host,
        device_bytes=_device_bytes(schedule, machine),
        exposed=exposed,
        mean_fraction=mean_fractions(exposed),
        uncertainty=uncertainty_of(machine, schedule)
        if timeline.provenance.kind == "simulated"
        else None,
        lower_bound_s=bound.step_s if bound else None,
        gap=step_s / bound.step_s - 1.0 if bound and bound.step_s else None,
        gap_family=step_s / bound.family_step_s - 1.0 if bound and bound.family_step_s else None,
        plan_seconds=plan_seconds,
        core_share=core_share_of(timeline.provenance),
    )


def _memory_bytes(
    schedule: Schedule, timeline: Timeline, machine: Machine
) -> dict[str, dict[str, int]]:
    """By class; classes may share a schedule."""
    known = {
        one.schedule: device_memory(schedule.of(one), timeline.classes[one.name].passes[-1])
        for one in schedule.classes
    }
    reserve = _stated(machine, "device_reserve_bytes") or 0
    found = {}
    for one in schedule.classes:
        caps = schedule.of(one).caps
        planned = is_executable(schedule) or caps.outside_arena_bytes
        kept = caps.outside_arena_bytes if planned else reserve
        found[one.name] = known[one.schedule] | {RESERVE: kept}
    return found


def _device_bytes(schedule: Schedule, machine: Machine) -> int | None:
    """What a device has; where every class is planned within a cap, the largest of these."""
    has = _stated(machine, "device_memory_bytes")
    caps = [schedule.of(one).caps.device_bytes for one in schedule.classes]
    known = [cap for cap in caps if cap is not None]
    if len(known) < len(caps):
        return has
    return max(known) if has is None else min(has, max(known))


def device_memory(schedule: RankSchedule, spans: PassSpans) -> dict[str, int]:
    """Bytes of a class's device arena by role of tensor.

    Of slots that do not overlap it is what they are for; else what is alive at the fullest moment
    of a pass, and `arena` is the rest of the arena.
    """
    slots = tuple(slot for slot in schedule.slots if slot.tier == DEVICE)
    found = slot_bytes_by_role(schedule.model_copy(update={"slots": slots}))
    arena = arena_bytes(schedule, DEVICE)
    rest = arena - sum(found.values())
    if rest >= 0:
        return found | ({ARENA: rest} if rest else {})
    samples = memory_over_time(schedule, spans, DEVICE)
    if not samples:
        return {ARENA: arena}
    fullest = max(samples, key=lambda sample: sample.total_bytes)
    alive = {str(role): size for role, size in fullest.bytes_by_role.items()}
    return alive | {ARENA: max(0, arena - fullest.total_bytes)}


def matmul_dtype(schedule: Schedule) -> str:
    """The narrowest dtype of matrix products; without any the model's, else bfloat16."""
    found = {
        work.dtype
        for part in schedule.schedules.values()
        for call in part.calls.values()
        for work in call.cost
        if work.unit == "matmul"
    }
    for dtype in (*_NARROW, *sorted(found)):
        if dtype in found and dtype in PEAK_OF_DTYPE:
            return dtype
    return str(schedule.model.get("dtype", "bfloat16"))


def _stated(machine: Machine, field: str) -> int | None:
    number = getattr(machine, field)
    return None if number is None or number.value is None else round(number.value)


def _of_direction(moved: Mapping[tuple[Role, str], int], direction: str) -> int:
    return sum(size for (_, way), size in moved.items() if way == direction)


def _executed_flops(schedule: Schedule) -> tuple[int, int]:
    """As `executed_flops`, of all ranks."""
    known = {name: executed_flops(part) for name, part in schedule.schedules.items()}
    found = [(schedule.num_ranks(one), known[one.schedule]) for one in schedule.classes]
    return sum(n * flops for n, (flops, _) in found), sum(n * again for n, (_, again) in found)


def executed_flops(schedule: RankSchedule) -> tuple[int, int]:
    """(matmul and attention FLOPs of one step, those of them in recompute tasks)."""
    per_call = {
        name: sum(work.flops for work in call.cost if is_compute_unit(work.unit))
        for name, call in schedule.calls.items()
    }
    computes = [op for op in schedule.ops if isinstance(op, Compute)]
    again = sum(per_call[op.call] for op in computes if op.label.kind == "block_recompute")
    return sum(per_call[op.call] for op in computes), again


def copied_bytes(schedule: RankSchedule) -> dict[str, int]:
    """Bytes that copies move in one step, by queue."""
    moved: dict[str, int] = {}
    for op, size_bytes in copied_sizes(schedule):
        moved[op.stream.queue] = moved.get(op.stream.queue, 0) + size_bytes
    return moved
