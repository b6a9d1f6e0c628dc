"""Plan a training step: choose how to cut it, then where every tensor lives."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering import lower
from twinstream.models.spec import ModelSpec
from twinstream.planner.bound import LowerBound, lower_bound
from twinstream.planner.chunking import TrainingStep, admissible, chunkings
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.plan import as_step_bound, finished, optimizer_place, plan_chain
from twinstream.planner.policies.optimal import JUDGED_ROUNDS, Plan, optimal_plans
from twinstream.planner.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.workload import Workload

DEFAULT_OVERHEAD = 0.01
_PLANNED = 2
_WORTH_IT = 1.01
_WORTH_BOUNDING = 1.005
_MANY_ROUNDS = 128


def plan_step(
    spec: ModelSpec,
    step: TrainingStep,
    machine: Machine,
    caps: Caps,
    policy: str,
    judge: Judge | None = None,
) -> Schedule:
    """A verified, conforming schedule of a training step, with its lower bounds.

    `optimal` chooses the chunking with the least step time; every other policy takes the preferred
    one that fits. Where the step leaves tokens per step open, `proposed_tokens` says how many.

    Raises:
        ChunkingError: what is fixed of the step contradicts itself.
        UnknownPolicyError: the message lists the policies there are.
        InfeasiblePlan: the caps are too small for the policy; it says what would do.
    """
    with gc_paused():
        return _plan_step(spec, step, machine, caps, policy, judge)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Planning makes millions of small objects without cycles; looking for any takes a quarter."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _plan_step(
    spec: ModelSpec,
    step: TrainingStep,
    machine: Machine,
    caps: Caps,
    policy: str,
    judge: Judge | None,
) -> Schedule:
    if policy == "optimal":
        return _Family(spec, step, machine, caps, judge).best()
    recipe = step.recipe.model_copy(update={"optimizer": optimizer_place(policy)})
    failed: InfeasiblePlan | None = None
    for workload in chunkings(spec, step):
        try:
            return plan_chain(lower(spec, workload, recipe), machine, caps, policy, judge)
        except InfeasiblePlan as error:
            failed = error
    assert failed is not None, "there is always at least one chunking"
    raise failed


def proposed_tokens(
    spec: ModelSpec, step: TrainingStep, machine: Machine, overhead: float = DEFAULT_OVERHEAD
) -> int:
    """The fewest tokens per step at which the optimizer takes at most a share of the step.

    The step's time is taken from the lower bound without caps, for the preferred chunking:
    `overhead` is what it takes beyond its rounds, each as long as a further one would be.
    """
    workload = chunkings(spec, step)[0]
    three = workload.model_copy(update={"rounds_per_step": PROGRAM_ROUNDS})
    chain = lower(spec, three, step.recipe)
    caps = Caps()
    some, more = (
        lower_bound(chain, machine, caps, num_rounds=n) for n in (_MANY_ROUNDS, 2 * _MANY_ROUNDS)
    )
    assert some is not None and more is not None, "nothing is capped"
    round_s = (more.step_s - some.step_s) / _MANY_ROUNDS
    beyond_s = max(0.0, some.step_s - _MANY_ROUNDS * round_s)
    rounds = max(1, ceil(beyond_s * (1.0 - overhead) / (overhead * round_s)))
    return workload.tokens_per_step // workload.rounds_per_step * rounds


@dataclass(frozen=True)
class _Bounded:
    """A way to cut the step, and what it takes at least."""

    workload: Workload
    few: Chain
    bound: LowerBound


class _Family:
    """All admissible ways to cut a step, and the search for the best."""

    def __init__(
        self,
        spec: ModelSpec,
        step: TrainingStep,
        machine: Machine,
        caps: Caps,
        judge: Judge | None,
    ) -> None:
        self.spec, self.step, self.machine, self.caps, self.judge = spec, step, machine, caps, judge
        self.recipe = step.recipe.model_copy(update={"optimizer": optimizer_place("optimal")})

    def best(self) -> Schedule:
        """The fastest schedule found; its bound has the least of all admissible workloads."""
        bounded = self._bounded()
        best: tuple[Plan, _Bounded] | None = None
        for tried, found in enumerate(bounded):
            least_ns = found.bound.step_s * 1e9 * _WORTH_IT
            if best is not None and (tried >= _PLANNED or least_ns >= best[0].step_ns):
                break
            plans = optimal_plans(
                found.few, self.machine, self.caps, self.judge,
                num_rounds=found.workload.rounds_per_step, bound_s=found.bound.step_s,
            )  # fmt: skip
            if plans and (best is None or plans[0].step_ns < best[0].step_ns):
                best = plans[0], found
        if best is None:
            return self._refused()
        plan, found = best
        chain = lower(self.spec, found.workload, self.recipe)
        schedule = plan.make(chain).model_copy(update={"policy": "optimal"})
        bound = as_step_bound(found.bound, family_step_s=min(b.bound.step_s for b in bounded))
        return finished(schedule, chain, bound)

    def _bounded(self) -> list[_Bounded]:
        """Admissible workloads by their bounds, the least first; of nearly equal ones the shorter.

        Left out is what cannot be better than another's bound by half a percent, because its tasks
        alone take as long. Where nothing fits, ever smaller chunks are tried.
        """
        found: list[_Bounded] = []
        least_s = inf
        for workload in admissible(self.spec, self.step):
            bounded = self._bound_of(workload, least_s)
            if bounded is not None:
                found.append(bounded)
                least_s = min(least_s, bounded.bound.step_s)
        for workload in [] if found else chunkings(self.spec, self.step):
            bounded = self._bound_of(workload, inf)
            if bounded is not None:
                found.append(bounded)
                break
        near_s = _WORTH_IT * least_s
        return sorted(
            found,
            key=lambda f: (
                max(f.bound.step_s, near_s),
                len(f.few.tasks) if f.bound.step_s <= near_s else 0,
            ),
        )

    def _bound_of(self, workload: Workload, least_s: float) -> _Bounded | None:
        few = lower(self.spec, _with_rounds(workload, JUDGED_ROUNDS), self.recipe)
        if self._alone_s(few, workload) * _WORTH_BOUNDING >= least_s:
            return None
        small = with_rounds(few, PROGRAM_ROUNDS)
        rounds = workload.rounds_per_step
        bound = lower_bound(small, self.machine, self.caps, num_rounds=rounds)
        return None if bound is None else _Bounded(workload, few, bound)

    def _alone_s(self, few: Chain, workload: Workload) -> float:
        """What the tasks of all rounds take alone."""
        alone = {name: cost_alone_ns(c.cost, self.machine) for name, c in few.calls.items()}
        total_ns = sum(alone[task.call] for task in few.tasks)
        more = workload.rounds_per_step - len(few.round_starts)
        if more > 0:
            middle = few.tasks[few.round_starts[1] : few.round_starts[2]]
            total_ns += more * sum(alone[task.call] for task in middle)
        return total_ns / 1e9

    def _refused(self) -> Schedule:
        """Raise what `plan_chain` says of the chunks that take the least."""
        workload = chunkings(self.spec, self.step)[-1]
        chain = lower(self.spec, workload, self.recipe)
        return plan_chain(chain, self.machine, self.caps, "optimal", self.judge)


def _with_rounds(workload: Workload, most: int) -> Workload:
    rounds = min(workload.rounds_per_step, most)
    return workload.model_copy(update={"rounds_per_step": rounds})
