"""`resident`: everything on the device, as little recompute as fits."""

from functools import partial

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import repeated
from twinstream.planner.lifetimes.recomputes import at_level, declared_levels
from twinstream.planner.lifetimes.stays import resident_stays
from twinstream.planner.lifetimes.uses import UnitMap, uses_by_unit
from twinstream.planner.rules.fitting import RulePlacement, first_fitting
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule


def plan_resident(chain: Chain, machine: Machine, caps: Caps) -> Schedule:
    """Parameters, gradients, optimizer state and saved activations never leave the device.

    Only inputs and the loss pass through host memory. All blocks share one recompute level, the
    first of FULL (none), ATTENTION, INPUT that fits.

    Raises:
        InfeasiblePlan: even at the last level the device cap is too small, or the host cap is.
    """
    return repeated(partial(resident_plan, machine=machine, caps=caps), chain)


def resident_plan(chain: Chain, machine: Machine, caps: Caps) -> Emitted:
    """What `plan_resident` makes of few rounds; it raises the same."""
    units = UnitMap(chain)
    levels = (None, *declared_levels(chain))
    placement = first_fitting(
        "resident", caps, (resident_placement(chain, units, level) for level in levels)
    )
    return emitted(placement, machine, caps, "resident")


def resident_placement(chain: Chain, units: UnitMap, level: str | None) -> RulePlacement:
    """Everything on the device, all blocks recomputed from one level (None: not at all)."""
    tasks = at_level(chain, level)
    stays = resident_stays(uses_by_unit(tasks, units), units, len(tasks))
    return RulePlacement.of(chain, tasks, units, stays)
