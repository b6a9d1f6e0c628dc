"""`full_recompute`: everything on the device, every block recomputed from its input."""

from functools import partial

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import repeated
from twinstream.planner.lifetimes.recomputes import declared_levels
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.rules.fitting import first_fitting
from twinstream.planner.rules.resident import resident_placement
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule


def plan_full_recompute(chain: Chain, machine: Machine, caps: Caps) -> RankSchedule:
    """Parameters, gradients and optimizer state stay on the device; every block is checkpointed.

    Models a PyTorch loop that wraps each block in `torch.utils.checkpoint`: backward runs after a
    second forward of the block, whatever memory is free. What our blocks save at their last level
    (input, norm scalars, K and V) is a little more than PyTorch's input alone, and what is
    recomputed a little less. Left out: the caching allocator's fragmentation.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174;
    https://docs.pytorch.org/docs/stable/checkpoint.html.

    Raises:
        InfeasiblePlan: a cap is too small; it says what would do, in bytes.
    """
    return repeated(partial(full_recompute_plan, machine=machine, caps=caps), chain)


def full_recompute_plan(chain: Chain, machine: Machine, caps: Caps) -> Emitted:
    """Plan a few rounds as `plan_full_recompute` does; it raises the same."""
    units = UnitMap(chain)
    level = next(reversed(declared_levels(chain)), None)
    placement = first_fitting("full_recompute", caps, [resident_placement(chain, units, level)])
    return emitted(placement, machine, caps, "full_recompute")
