"""The first of a policy's placements that fits the caps, or the smallest caps that would do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinstream.planner.emit.emission import Placement, host_bytes, host_overflow_task
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.library_memory import with_library_memory
from twinstream.planner.lifetimes.rounds import Folding
from twinstream.planner.lifetimes.stays import Stay, stay_intervals
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.pack.folded_packing import pack_folded
from twinstream.planner.pack.live_bytes import live_peak
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.document import Caps


@dataclass(frozen=True)
class Packed:
    """A placement with its offsets, and what it takes of both memories."""

    placement: Placement
    device_bytes: int

    @staticmethod
    def of(chain: Chain, tasks: Sequence[Task], units: UnitMap, stays: Sequence[Stay]) -> "Packed":
        """With no cap; steady rounds use equal slots."""
        folding = Folding.of(chain, tasks)
        packed = pack_folded(stays, units, folding, cap_bytes=None, tight=True)
        return Packed(Placement(chain, tasks, units, stays, packed.offsets), packed.extent_bytes)

    @property
    def host_bytes(self) -> int:
        return host_bytes(self.placement)


def first_fitting(policy: str, caps: Caps, placements: Iterable[Packed]) -> Placement:
    """The first placement that both caps hold; no later one is made.

    Raises:
        InfeasiblePlan: none fits; the caps it names are exact for these placements.
    """
    failed = []
    for packed in placements:
        caps = with_library_memory(caps, packed.placement.chain)
        if _fits_device(packed, caps) and _fits_host(packed, caps):
            return packed.placement
        failed.append(packed)
    raise InfeasiblePlan(_shortage(policy, caps, failed))


def _shortage(policy: str, caps: Caps, failed: list[Packed]) -> Shortage:
    reserve = caps.outside_arena_bytes
    within_host = [p.device_bytes + reserve for p in failed if _fits_host(p, caps)]
    within_device = [p for p in failed if _fits_device(p, caps)]
    least_device = min(within_host, default=None)
    if within_device:
        least = min(within_device, key=lambda packed: packed.host_bytes)
        assert caps.host_bytes is not None
        task = host_overflow_task(least.placement, caps.host_bytes)
        needed = least.host_bytes
        return Shortage(policy, "host", caps.host_bytes, needed, task, least_device, needed)
    least = min(failed, key=lambda packed: packed.device_bytes)
    at = live_peak(stay_intervals(least.placement.units, least.placement.stays))[1]
    task = least.placement.tasks[at].task_id
    assert caps.device_bytes is not None
    needed = least.device_bytes + reserve
    return Shortage(
        policy, "device", caps.device_bytes, needed, task, least_device, None, caps.library_bytes
    )


def _fits_device(packed: Packed, caps: Caps) -> bool:
    cap = caps.arena_bytes("device")
    return cap is None or packed.device_bytes <= cap


def _fits_host(packed: Packed, caps: Caps) -> bool:
    return caps.host_bytes is None or packed.host_bytes <= caps.host_bytes
