"""Every plan is proven and gets its bound before it is handed out."""

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.host_bound import raised_by_host
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.lifetimes.host_tasks import host_tasks, without_host_tasks
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule, StepBound
from twinstream.schedule.proof.conforms import require_conforming
from twinstream.schedule.proof.verify import require_safe_rank


def proven(schedule: RankSchedule, chain: Chain, bound: StepBound | None) -> RankSchedule:
    """Return the schedule with its bound, proven safe and conforming.

    Raises:
        UnsafeSchedule: it is not safe: a fault of the policy.
        NonconformingSchedule: it does not compute the chain: likewise.
    """
    require_safe_rank(schedule)
    require_conforming(schedule, chain)
    return schedule.model_copy(update={"bound": bound})


def step_bound(chain: Chain, machine: Machine, caps: Caps) -> StepBound | None:
    """Return the lower bound in the form that schedules carry; None when nothing fits the caps.

    Of a chain with tasks on the host it is that of `raised_by_host`.
    """
    few = with_rounds(chain, PROGRAM_ROUNDS)
    with_host = bool(host_tasks(chain))
    if with_host:
        few = without_host_tasks(few)
    found = lower_bound(few, machine, caps, num_rounds=len(chain.round_starts))
    if found is None:
        return None
    bound = found.as_step_bound()
    return raised_by_host(bound, chain, machine) if with_host else bound
