"""Plan by policy name; every plan is verified before it is returned."""

from collections.abc import Callable, Mapping

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound import lower_bound
from twinstream.planner.judge import Judge
from twinstream.planner.policies.optimal import plan_optimal
from twinstream.planner.policies.resident import plan_resident
from twinstream.planner.policies.streaming import plan_streaming
from twinstream.planner.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.schedule.chain import Chain
from twinstream.schedule.conforms import require_conforming
from twinstream.schedule.document import Caps, Schedule, StepBound
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.verify import require_safe

Policy = Callable[[Chain, Machine, Caps, Judge | None], Schedule]


class UnknownPolicyError(TwinstreamError):
    """No policy of that name."""


def policies() -> Mapping[str, Policy]:
    """The policies by name."""
    return {"optimal": plan_optimal, "streaming": plan_streaming, "resident": plan_resident}


def plan_chain(
    chain: Chain, machine: Machine, caps: Caps, policy: str, judge: Judge | None = None
) -> Schedule:
    """A verified, conforming schedule of the chain within the caps, with the chain's lower bound.

    Args:
        chain: the training step.
        machine: what it is planned for.
        caps: of both memories.
        policy: by name.
        judge: a simulator of that machine; `optimal` asks it.

    Raises:
        UnknownPolicyError: the message lists the policies there are.
        InfeasiblePlan: the caps are too small for the policy; it says what would do.
    """
    known = policies()
    if policy not in known:
        raise UnknownPolicyError(f"unknown policy '{policy}'; known: {', '.join(known)}")
    schedule = known[policy](chain, machine, caps, judge)
    require_safe(schedule)
    require_conforming(schedule, chain)
    return schedule.model_copy(update={"bound": step_bound(chain, machine, caps)})


def step_bound(chain: Chain, machine: Machine, caps: Caps) -> StepBound | None:
    """The lower bound in the form that schedules carry; None when nothing fits the caps."""
    few = with_rounds(chain, PROGRAM_ROUNDS)
    found = lower_bound(few, machine, caps, num_rounds=len(chain.round_starts))
    if found is None:
        return None
    return StepBound(
        step_s=found.step_s,
        device_s_per_gib=found.device_s_per_gib,
        host_s_per_gib=found.host_s_per_gib,
        link_s_per_gb_per_s=found.link_s_per_gb_per_s,
        limits=found.limits,
    )
