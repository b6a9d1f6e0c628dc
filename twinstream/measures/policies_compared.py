"""Every policy on the same step, machine and caps: `twinstream plan --policy all`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import NonNegativeInt

from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.measures.metrics import Summary, summarize
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.planner.policies import compared_names
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError, require
from twinstream.schedule.node import Node
from twinstream.schedule.sizes import as_cap, gib
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate as replay
from twinstream.simulator.replay import steady_state

ALL = "all"


class PolicyOutcome(Node):
    """What one policy yields; of one that cannot be planned only the reason is known.

    `reason` says what is short by how much, `at_task` where.
    `enough_device_bytes` is a device cap that would do at the given host cap,
    `enough_host_bytes` the reverse; they are the smallest unless `less_may_do`.
    """

    policy: str
    workload: Workload | None = None
    summary: Summary | None = None
    reason: str | None = None
    at_task: str | None = None
    enough_device_bytes: NonNegativeInt | None = None
    enough_host_bytes: NonNegativeInt | None = None
    less_may_do: bool = False

    @property
    def told(self) -> str:
        """Why there is no plan, and which caps would do."""
        options = [
            f"{flag} {as_cap(size)}"
            for flag, size in (
                ("--device-mem", self.enough_device_bytes),
                ("--host-mem", self.enough_host_bytes),
            )
            if size is not None
        ]
        fits = f"; fits with {' or '.join(options)}" if options else ""
        if options and self.less_may_do:
            fits += ", maybe with less"
        return f"{self.policy}: {self.reason}{fits}"


class NoPolicyFits(TwinstreamError):
    """No policy has a plan; `outcomes` says of each why."""

    def __init__(self, outcomes: Sequence[PolicyOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        reasons = "".join(f"\n  {outcome.told}" for outcome in outcomes)
        super().__init__(f"no policy has a plan of this step within these caps{reasons}")


@dataclass(frozen=True)
class PoliciesCompared:
    """Outcomes in the order of `compared_names()`, and the schedule with the least step time."""

    outcomes: tuple[PolicyOutcome, ...]
    best: Schedule
    best_timeline: Timeline


def compare_policies(
    request: PlanRequest,
    own: Sequence[str] = (),
    *,
    on_policy: Callable[[], None] = lambda: None,
) -> PoliciesCompared:
    """Plan and simulate the step by `optimal` and by every rule; each cuts it as it does alone.

    Tokens per step that are left open are the same for all. `on_policy` is called after each.

    Args:
        own: further policies by name, or FILE.py:NAME.

    Raises:
        NoPolicyFits: none has a plan within the caps; it says of each why.
        TwinstreamError: as `Planner.plan`.
    """
    require("request", request, PlanRequest)
    planner = Planner(steady_state)
    tokens = planner.prepared(replace(request, policy=DEFAULT_POLICY)).step.tokens_per_step
    assert tokens is not None
    outcomes: list[PolicyOutcome] = []
    best: tuple[Schedule, Timeline] | None = None
    for policy in compared_names(own):
        start_s = time.perf_counter()
        try:
            schedule = planner.plan(replace(request.with_tokens(tokens), policy=policy))
        except (InfeasiblePlan, MissingNumberError) as error:
            outcomes.append(_refused(policy, error))
        else:
            plan_seconds = time.perf_counter() - start_s
            timeline = replay(schedule, request.machine)
            summary = summarize(schedule, timeline, request.machine, plan_seconds)
            outcomes.append(
                PolicyOutcome(policy=policy, workload=schedule.workload, summary=summary)
            )
            if best is None or timeline.step_ns < best[1].step_ns:
                best = schedule, timeline
        on_policy()
    if best is None:
        raise NoPolicyFits(outcomes)
    return PoliciesCompared(tuple(outcomes), *best)


def _refused(policy: str, error: TwinstreamError) -> PolicyOutcome:
    if not isinstance(error, InfeasiblePlan):
        return PolicyOutcome(policy=policy, reason=str(error).split(". ")[0])
    short = error.shortage
    missing = short.needed_bytes - short.cap_bytes
    return PolicyOutcome(
        policy=policy,
        reason=f"{gib(missing)} of {short.cap} memory short" if missing > 0 else "no plan found",
        at_task=short.task,
        enough_device_bytes=short.enough_device_bytes,
        enough_host_bytes=short.enough_host_bytes,
        less_may_do=short.less_may_do,
    )
