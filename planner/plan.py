"""Plan by policy name; every plan is verified before it is returned."""

from collections.abc import Callable, Mapping

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.policies.resident import plan_resident
from twinstream.planner.policies.streaming import plan_streaming
from twinstream.schedule.chain import Chain
from twinstream.schedule.conforms import require_conforming
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.verify import require_safe

Policy = Callable[[Chain, Machine, Caps], Schedule]


class UnknownPolicyError(TwinstreamError):
    """No policy of that name."""


def policies() -> Mapping[str, Policy]:
    """The policies by name."""
    return {"resident": plan_resident, "streaming": plan_streaming}


def plan_chain(chain: Chain, machine: Machine, caps: Caps, policy: str) -> Schedule:
    """A verified, conforming schedule of the chain within the caps.

    Raises:
        UnknownPolicyError: the message lists the policies there are.
        InfeasiblePlan: the caps are too small for the policy; it says what would do.
    """
    known = policies()
    if policy not in known:
        raise UnknownPolicyError(f"unknown policy '{policy}'; known: {', '.join(known)}")
    schedule = known[policy](chain, machine, caps)
    require_safe(schedule)
    require_conforming(schedule, chain)
    return schedule
