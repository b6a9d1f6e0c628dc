"""Headline figures of a cluster's schedule and timeline."""

from typing import Literal

from pydantic import NonNegativeInt

from twinstream.clusters.predict import memory_of
from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of_cluster
from twinstream.schedule.analysis.idle import ExposedTime, exposed_times, mean_fractions
from twinstream.schedule.analysis.occupancy import memory_over_time
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.document import Schedule
from twinstream.schedule.node import Node
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.timeline import PassSpans

RESERVE, ARENA = "reserve", "arena"
_NARROW = ("fp4", "fp8")


class ClusterSummary(Node):
    """What a step of a cluster costs and yields.

    `mfu` is of the bf16 peak, or of that of the narrowest dtype in which matrices are multiplied.
    `memory_bytes` is, by class of ranks, a rank's device memory by role of tensor (`arena`: what
    is not alive at its fullest moment), and the `reserve` of context and libraries; `device_bytes`
    is what a device has, or its cap (None: neither is known). `host_bytes` is a rank's host arena.
    `exposed` has where the step of each class goes, `mean_fraction` its share by cause, mean over
    ranks, `compute` among them. `uncertainty` is how far off predicted times and rates may be;
    None of what was measured.
    """

    step_time_s: float
    cold_step_time_s: float
    num_gpus: int
    device: Literal["cuda", "cpu"]
    tokens_per_step: int
    tokens_per_s: float
    mfu: float
    memory_bytes: dict[str, dict[str, NonNegativeInt]]
    device_bytes: NonNegativeInt | None
    host_bytes: dict[str, NonNegativeInt]
    exposed: tuple[ExposedTime, ...]
    mean_fraction: dict[str, float]
    uncertainty: Uncertainty | None

    @property
    def devices(self) -> str:
        """What the ranks are called: GPUs, or processes on CPUs."""
        return "GPUs" if self.device == "cuda" else "ranks"

    @property
    def fullest(self) -> str:
        """The class that takes most device memory."""
        return max(self.memory_bytes, key=lambda name: sum(self.memory_bytes[name].values()))

    @property
    def missing_bytes(self) -> int:
        """What the fullest class takes more than a device has."""
        if self.device_bytes is None:
            return 0
        return max(0, sum(self.memory_bytes[self.fullest].values()) - self.device_bytes)


def summarize_cluster(
    schedule: ClusterSchedule, timeline: ClusterTimeline, machine: Machine
) -> ClusterSummary:
    """Headline figures of a timeline of a cluster's schedule.

    Args:
        machine: the profile of a node, whose peak the MFU is a share of.

    Raises:
        TimelineMismatch: the timeline is not of this schedule.
        MissingNumberError: the machine's profile lacks the peak.
    """
    exposed = exposed_times(schedule, timeline)
    step_s = timeline.step_ns / 1e9
    peak = machine.number(PEAK_OF_DTYPE[matmul_dtype(schedule)])
    tokens = schedule.tokens_per_step
    known = {
        one.schedule: device_memory(schedule.of(one), timeline.classes[one.name].passes[-1])
        for one in schedule.classes
    }
    reserve = {RESERVE: _stated(machine, "device_reserve_bytes") or 0}
    return ClusterSummary(
        step_time_s=step_s,
        cold_step_time_s=timeline.cold_ns / 1e9,
        num_gpus=schedule.mesh.size,
        device=machine.device,
        tokens_per_step=tokens,
        tokens_per_s=tokens / step_s,
        mfu=schedule.model_flops / (step_s * schedule.mesh.size * peak),
        memory_bytes={one.name: known[one.schedule] | reserve for one in schedule.classes},
        host_bytes={one.name: arena_bytes(schedule.of(one), HOST) for one in schedule.classes},
        device_bytes=_device_bytes(schedule, machine),
        exposed=exposed,
        mean_fraction=mean_fractions(exposed),
        uncertainty=uncertainty_of_cluster(machine, schedule)
        if timeline.provenance.kind == "simulated"
        else None,
    )


def _device_bytes(schedule: ClusterSchedule, machine: Machine) -> int | None:
    """What a device has; where every class is planned within a cap, the largest of these."""
    has = _stated(machine, "device_memory_bytes")
    caps = [schedule.of(one).caps.device_bytes for one in schedule.classes]
    known = [cap for cap in caps if cap is not None]
    if len(known) < len(caps):
        return has
    return max(known) if has is None else min(has, max(known))


def device_memory(schedule: Schedule, spans: PassSpans) -> dict[str, int]:
    """Bytes of a class's device arena by role of tensor.

    Of slots that do not overlap it is what they are for; else what is alive at the fullest moment
    of a pass, and `arena` is the rest of the arena.
    """
    slots = tuple(slot for slot in schedule.slots if slot.tier == DEVICE)
    found = memory_of(schedule.model_copy(update={"slots": slots}))
    arena = arena_bytes(schedule, DEVICE)
    if sum(found.values()) <= arena:
        return found
    samples = memory_over_time(schedule, spans, DEVICE)
    if not samples:
        return {ARENA: arena}
    fullest = max(samples, key=lambda sample: sample.total_bytes)
    alive = {str(role): size for role, size in fullest.bytes_by_role.items()}
    return alive | {ARENA: arena - fullest.total_bytes}


def matmul_dtype(schedule: ClusterSchedule) -> str:
    """The narrowest dtype of matrix products; bfloat16 if there are none."""
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
    return "bfloat16"


def _stated(machine: Machine, field: str) -> int | None:
    number = getattr(machine, field)
    return None if number is None or number.value is None else round(number.value)
