"""`resident`: everything on the device, as little recompute as fits."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from functools import partial

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import repeated
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.recomputes import at_level, declared_levels
from twinstream.planner.lifetimes.residencies import Residency, unbroken_residencies
from twinstream.planner.lifetimes.uses import UnitMap, uses_by_unit
from twinstream.planner.pack.placement import Placement
from twinstream.planner.rules.fitting import RulePlacement, first_fitting
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule


def plan_resident(chain: Chain, machine: Machine, caps: Caps) -> RankSchedule:
    """Parameters, gradients, optimizer state and saved activations never leave the device.

    Only inputs and the loss pass through host memory. All blocks share one recompute level, the
    first of FULL (none), ATTENTION, INPUT that fits.

    Raises:
        InfeasiblePlan: even at the last level the device cap is too small, or the host cap is.
    """
    return repeated(partial(resident_plan, machine=machine, caps=caps), chain)


def resident_plan(chain: Chain, machine: Machine, caps: Caps) -> Emitted:
    """Plan a few rounds as `plan_resident` does; it raises the same."""
    units = UnitMap(chain)
    levels = (None, *declared_levels(chain))
    placement = first_fitting(
        "resident", caps, (resident_placement(chain, units, level) for level in levels)
    )
    return emitted(placement, machine, caps, "resident")


def pooled_resident_plan(chain: Chain, machine: Machine, caps: Caps) -> Emitted | None:
    """Everything on the device and nothing recomputed, packed in linear time; None where that does
    not fit.

    Units of one size share a pool of slots, of which the one that has been free longest is taken:
    tasks of other streams are through with it.
    """
    units, tasks = UnitMap(chain), at_level(chain, None)
    residencies = unbroken_residencies(uses_by_unit(tasks, units), units, len(tasks))
    offsets, extent_bytes = _pooled(residencies, units)
    placement = Placement(chain, tasks, units, residencies, offsets)
    placed = RulePlacement(placement, extent_bytes)
    within = with_library_memory(caps, chain)
    if not placed.fits_device(within) or not placed.fits_host(within):
        return None
    return emitted(placement, machine, caps, "resident")


def _pooled(residencies: Sequence[Residency], units: UnitMap) -> tuple[list[int], int]:
    """Offsets of residencies, and the extent of all."""
    offsets, extent = [0] * len(residencies), 0
    free: dict[int, deque[tuple[int, int]]] = {}  # by size: since when, and where
    for index in sorted(range(len(residencies)), key=lambda one: residencies[one].begin):
        residency = residencies[index]
        size = align_up(units.units[residency.unit].tensor.size_bytes)
        pool = free.setdefault(size, deque())
        if pool and pool[0][0] <= residency.begin and not residency.enters:
            offsets[index] = pool.popleft()[1]
        else:
            offsets[index], extent = extent, extent + size
        if not residency.leaves:
            insort(pool, (residency.end, offsets[index]))
    return offsets, extent


def resident_placement(chain: Chain, units: UnitMap, level: str | None) -> RulePlacement:
    """Everything on the device, all blocks recomputed from one level (None: not at all)."""
    tasks = at_level(chain, level)
    residencies = unbroken_residencies(uses_by_unit(tasks, units), units, len(tasks))
    return RulePlacement.of(chain, tasks, units, residencies)
