"""Every policy on the same step, machine and caps: `twinstream plan --policy all`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt

from twinstream import api
from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.models.presets import load_model
from twinstream.models.spec import ModelSpec
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.plan import policies
from twinstream.planner.search.chunking import TrainingStep
from twinstream.planner.step_plan import with_tokens
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError, require
from twinstream.schedule.node import Node
from twinstream.schedule.sizes import as_cap, gib
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Workload

ALL = "all"


class PolicyOutcome(Node):
    """What one policy yields; of one that cannot be planned only the reason is known.

    `reason` says what is short by how much, `at_task` where.
    `smallest_device_bytes` is a device cap that would do at the given host cap,
    `smallest_host_bytes` the reverse; they are the smallest unless `less_may_do`.
    """

    policy: str
    workload: Workload | None = None
    summary: Summary | None = None
    reason: str | None = None
    at_task: str | None = None
    smallest_device_bytes: NonNegativeInt | None = None
    smallest_host_bytes: NonNegativeInt | None = None
    less_may_do: bool = False

    @property
    def told(self) -> str:
        """Why there is no plan, and which caps would do."""
        options = [
            f"{flag} {as_cap(size)}"
            for flag, size in (
                ("--device-mem", self.smallest_device_bytes),
                ("--host-mem", self.smallest_host_bytes),
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
    """The outcomes, in the order of `policies()`, and the schedule with the least step time."""

    outcomes: tuple[PolicyOutcome, ...]
    best: Schedule
    best_timeline: Timeline


def compare_policies(
    model: str | Path | ModelSpec,
    machine: str | Path | Machine,
    *,
    step: TrainingStep,
    device_mem: str | int | None = None,
    host_mem: str | int | None = None,
    on_policy: Callable[[], None] | None = None,
) -> PoliciesCompared:
    """Plan and simulate the step by every policy; each cuts it as it does alone.

    Tokens per step that are left open are the same for all. `on_policy` is called after each.

    Raises:
        NoPolicyFits: none has a plan within the caps; it says of each why.
        TwinstreamError: as `api.plan`.
    """
    spec, profile = load_model(model), load_machine(machine)
    require("step", step, TrainingStep)
    caps = api.caps_of(profile, device_mem, host_mem)
    whole = with_tokens(spec, step, profile, caps)
    outcomes: list[PolicyOutcome] = []
    best: tuple[Schedule, Timeline] | None = None
    for policy in policies():
        start_s = time.perf_counter()
        try:
            schedule = api.plan(
                spec, profile, step=whole, device_mem=caps.device_bytes, host_mem=caps.host_bytes,
                policy=policy,
            )  # fmt: skip
        except (InfeasiblePlan, MissingNumberError) as error:
            outcomes.append(_refused(policy, error))
        else:
            plan_seconds = time.perf_counter() - start_s
            timeline = api.simulate(schedule, profile)
            summary = summarize(schedule, timeline, profile, plan_seconds)
            outcomes.append(
                PolicyOutcome(policy=policy, workload=schedule.workload, summary=summary)
            )
            if best is None or timeline.step_ns < best[1].step_ns:
                best = schedule, timeline
        if on_policy is not None:
            on_policy()
    if best is None:
        raise NoPolicyFits(outcomes)
    return PoliciesCompared(tuple(outcomes), *best)


def _refused(policy: str, error: TwinstreamError) -> PolicyOutcome:
    if not isinstance(error, InfeasiblePlan):
        return PolicyOutcome(policy=policy, reason=str(error).split(". ")[0])
    short = error.shortage
    missing = gib(short.needed_bytes - short.cap_bytes)
    return PolicyOutcome(
        policy=policy,
        reason=f"{missing} of {short.cap} memory short",
        at_task=short.task,
        smallest_device_bytes=short.smallest_device_bytes,
        smallest_host_bytes=short.smallest_host_bytes,
        less_may_do=not short.smallest,
    )
