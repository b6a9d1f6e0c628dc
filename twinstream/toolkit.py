"""What a planning policy of your own is made of: `twinstream plan --policy FILE.py:POLICY`.

A rule plans a chain. It chooses when each unit of memory lives where (residencies) and which tasks
are recomputed; a placement gives them addresses, and `emitted` writes the schedule. The planner
proves what comes back. `examples/greedy_policy.py` is one in forty lines.
"""

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import repeated
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.lifetimes.recomputes import at_level, declared_levels
from twinstream.planner.lifetimes.residencies import (
    Residency,
    chosen_residencies,
    unbroken_residencies,
)
from twinstream.planner.lifetimes.uses import UnitMap, uses_by_unit
from twinstream.planner.policies import Policy
from twinstream.planner.request import PlanRequest
from twinstream.planner.rules.fitting import RulePlacement, first_fitting
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule

__all__ = [
    "Caps",
    "Chain",
    "Emitted",
    "InfeasiblePlan",
    "Machine",
    "PlanRequest",
    "Policy",
    "RankSchedule",
    "Residency",
    "RulePlacement",
    "UnitMap",
    "at_level",
    "chosen_residencies",
    "declared_levels",
    "emitted",
    "first_fitting",
    "repeated",
    "unbroken_residencies",
    "uses_by_unit",
]
