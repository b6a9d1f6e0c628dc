"""`resident`: everything on the device, as little recompute as fits."""

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emission import Placement, emit, host_bytes
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.judge import Judge
from twinstream.planner.packing import live_peak, pack
from twinstream.planner.residency import resident_stays, stay_intervals
from twinstream.planner.sequence import with_recomputes
from twinstream.planner.uses import UnitMap, uses_by_unit
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule


def plan_resident(
    chain: Chain, machine: Machine, caps: Caps, judge: Judge | None = None
) -> Schedule:
    """Parameters, gradients, optimizer state and saved activations never leave the device.

    Only inputs and the loss pass through host memory. All blocks share one recompute level, the
    first of FULL (none), ATTENTION, INPUT that fits.

    Raises:
        InfeasiblePlan: even at the last level the device cap is too small, or the host cap is.
    """
    units = UnitMap(chain)
    arena_cap = caps.arena_bytes("device")
    placements = []
    for level in (None, *_levels(chain)):
        placement, extent = _place(chain, units, level)
        if arena_cap is None or extent <= arena_cap:
            needed_host = host_bytes(placement)
            if caps.host_bytes is None or needed_host <= caps.host_bytes:
                return emit(placement, machine, caps, "resident")
            raise InfeasiblePlan(
                Shortage(
                    "resident", "host", caps.host_bytes, needed_host, chain.tasks[0].task_id,
                    None, needed_host,
                )
            )  # fmt: skip
        placements.append((extent, placement))
    extent, placement = min(placements, key=lambda found: found[0])
    assert caps.device_bytes is not None
    needed = extent + caps.device_reserve_bytes
    at = live_peak(stay_intervals(units, placement.stays))[1]
    host_fits = caps.host_bytes is None or host_bytes(placement) <= caps.host_bytes
    raise InfeasiblePlan(
        Shortage(
            "resident", "device", caps.device_bytes, needed, placement.tasks[at].task_id,
            needed if host_fits else None, None,
        )
    )  # fmt: skip


def _levels(chain: Chain) -> list[str]:
    """Recompute levels in the order the chain declares them: the cheapest first."""
    names = [r.task.label.level for r in chain.recomputes]
    return list(dict.fromkeys(name for name in names if name is not None))


def _place(chain: Chain, units: UnitMap, level: str | None) -> tuple[Placement, int]:
    groups = {r.group for r in chain.recomputes} if level else set()
    tasks = with_recomputes(chain, dict.fromkeys(groups, level or ""))
    stays = resident_stays(uses_by_unit(tasks, units), units, len(tasks))
    offsets, extent = pack(stay_intervals(units, stays))
    return Placement(chain, tasks, units, stays, offsets), extent
