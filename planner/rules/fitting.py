"""The first of a rule's placements that fits the caps, or the smallest caps that would do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.lifetimes.live_bytes import live_peak
from twinstream.planner.lifetimes.residencies import Residency, residency_intervals
from twinstream.planner.lifetimes.rounds import Folding
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.pack.folded_packing import FoldedPacking, pack_folded
from twinstream.planner.pack.placement import Placement
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.document import Caps

_WASTE = (1.0, 1.01, 1.03)  # x the most bytes alive at once: extents that are tried


@dataclass(frozen=True)
class RulePlacement:
    """A placement with its offsets, and the device bytes that it takes."""

    placement: Placement
    device_bytes: int

    @staticmethod
    def of(
        chain: Chain, tasks: Sequence[Task], units: UnitMap, residencies: Sequence[Residency]
    ) -> "RulePlacement":
        """Pack a placement in as few bytes as packing finds; steady rounds use equal slots."""
        packing = _smallest(residencies, units, Folding.of(chain, tasks))
        placement = Placement(chain, tasks, units, packing.residencies, packing.offsets)
        return RulePlacement(placement, packing.extent_bytes)

    def fits_device(self, caps: Caps) -> bool:
        cap = caps.arena_bytes("device")
        return cap is None or self.device_bytes <= cap

    def fits_host(self, caps: Caps) -> bool:
        return caps.host_bytes is None or self.placement.host_bytes <= caps.host_bytes


def first_fitting(policy: str, caps: Caps, placements: Iterable[RulePlacement]) -> Placement:
    """Return the first placement that both caps hold; no later one is made.

    Raises:
        InfeasiblePlan: none fits; the caps it names are exact for these placements.
    """
    failed = []
    for placed in placements:
        caps = with_library_memory(caps, placed.placement.chain)
        if placed.fits_device(caps) and placed.fits_host(caps):
            return placed.placement
        failed.append(placed)
    raise InfeasiblePlan(_shortage(policy, caps, failed))


def _smallest(residencies: Sequence[Residency], units: UnitMap, folding: Folding) -> FoldedPacking:
    peak, _ = live_peak(residency_intervals(units, residencies))
    for waste in _WASTE:
        packing = pack_folded(residencies, units, folding, round(waste * peak))
        if not packing.over_bytes:
            return packing
    return pack_folded(residencies, units, folding, None)


def _shortage(policy: str, caps: Caps, failed: list[RulePlacement]) -> Shortage:
    reserve = caps.outside_arena_bytes
    within_host = [p.device_bytes + reserve for p in failed if p.fits_host(caps)]
    within_device = [p for p in failed if p.fits_device(caps)]
    least_device = min(within_host, default=None)
    if within_device:
        least = min(within_device, key=lambda placed: placed.placement.host_bytes)
        assert caps.host_bytes is not None
        task = least.placement.host_overflow_task(caps.host_bytes)
        needed = least.placement.host_bytes
        return Shortage(policy, "host", caps.host_bytes, needed, task, least_device, needed)
    least = min(failed, key=lambda placed: placed.device_bytes)
    at = live_peak(residency_intervals(least.placement.units, least.placement.residencies))[1]
    task = least.placement.tasks[at].task_id
    assert caps.device_bytes is not None
    needed = least.device_bytes + reserve
    return Shortage(
        policy, "device", caps.device_bytes, needed, task, least_device, None, caps.library_bytes
    )
