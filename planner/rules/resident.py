"""`resident`: everything on the device, as little recompute as fits."""

from functools import partial

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import repeated
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.lifetimes.recomputes import at_level, declared_levels
from twinstream.planner.lifetimes.stays import resident_stays
from twinstream.planner.lifetimes.uses import UnitMap, uses_by_unit
from twinstream.planner.rules.fitting import Packed, first_fitting
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
    return repeated(partial(resident_plan, machine=machine, caps=caps), chain)


def resident_plan(chain: Chain, machine: Machine, caps: Caps) -> Emitted:
    """What `plan_resident` makes of few rounds; it raises the same."""
    units = UnitMap(chain)
    levels = (None, *declared_levels(chain))
    placement = first_fitting(
        "resident", caps, (resident_placement(chain, units, level) for level in levels)
    )
    return emitted(placement, machine, caps, "resident")


def resides(chain: Chain, machine: Machine, caps: Caps) -> bool:
    """Whether there is such a plan."""
    if not holds_all_state(chain, caps):
        return False
    try:
        plan_resident(chain, machine, caps)
    except InfeasiblePlan:
        return False
    return True


def holds_all_state(chain: Chain, caps: Caps) -> bool:
    """Whether the device has room for what persists, at the least."""
    cap, persistent = caps.arena_bytes("device"), set(chain.persistent)
    state = sum(t.size_bytes for t in chain.tensors if t.tensor_id in persistent)
    return cap is None or state <= cap


def resident_placement(chain: Chain, units: UnitMap, level: str | None) -> Packed:
    """Everything on the device, all blocks recomputed from one level (None: not at all)."""
    tasks = at_level(chain, level)
    stays = resident_stays(uses_by_unit(tasks, units), units, len(tasks))
    return Packed.of(chain, tasks, units, stays)
