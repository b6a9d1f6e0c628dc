"""Plan a training step: choose how to cut it, then where every tensor lives."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, inf

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering import lower
from twinstream.models.spec import ModelSpec
from twinstream.planner.bound import LowerBound, lower_bound
from twinstream.planner.chunking import TrainingStep, admissible, chunkings
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.plan import as_step_bound, finished, optimizer_place, plan_chain, step_bound
from twinstream.planner.policies.ml_dataflow import POLICY as SEED_POLICY
from twinstream.planner.policies.ml_dataflow_step import plan_seed_step
from twinstream.planner.policies.optimal import (
    JUDGED_ROUNDS,
    MANY_TASKS,
    DoesNotFit,
    Plan,
    has_plan,
    optimal_plans,
    required,
)
from twinstream.planner.policies.streaming import plan_streaming
from twinstream.planner.refusal import refused
from twinstream.planner.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.workload import Workload

_PLANNED = 2
_WORTH_IT = 1.01
_WORTH_IT_OF_MANY = 1.08
_WORTH_BOUNDING = 1.005
_FAR = 1.02
_MANY_ROUNDS = 128
_MOST_CHUNKS_BOUNDED = 8
_SPARE_ROUNDS = 8


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
    one that fits. Where the step leaves tokens per step open, `proposed_tokens` says how many, for
    every policy alike. `ml_dataflow` cuts the step by rules of its own (`plan_seed_step`).

    Raises:
        ChunkingError: what is fixed of the step contradicts itself.
        UnknownPolicyError: the message lists the policies there are.
        InfeasiblePlan: the caps are too small for the policy; it says what would do.
    """
    with gc_paused():
        if policy == SEED_POLICY:
            return plan_seed_step(spec, step, machine, caps)
        whole = with_tokens(spec, step, machine, caps)
        return _plan_step(spec, whole, machine, caps, policy, judge)


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


def with_tokens(spec: ModelSpec, step: TrainingStep, machine: Machine, caps: Caps) -> TrainingStep:
    """The step itself, with the proposed tokens per step where they are open."""
    if step.tokens_per_step is not None:
        return step
    return replace(step, tokens_per_step=proposed_tokens(spec, step, machine, caps))


def proposed_tokens(spec: ModelSpec, step: TrainingStep, machine: Machine, caps: Caps) -> int:
    """The fewest tokens per step at which the optimizer takes at most its share of the step.

    The share is `step.optimizer_overhead`. The optimizer takes what a step takes beyond its rounds,
    each as long as a further one would be; both by the lower bound within the caps, or without
    them where nothing fits. They are whole rounds of the preferred chunking; where that is not
    fixed, up to an eighth more, so that rounds can be merged into larger ones.
    """
    workload = chunkings(spec, step)[0]
    short = _shortened(workload)
    round_s, beyond_s = _round_and_beyond_s(spec, short, step, machine, caps)
    share = step.optimizer_overhead
    rounds = max(1, ceil(beyond_s * (1.0 - share) / (share * round_s)))
    rounds = ceil(rounds * short.chunks_per_round / workload.chunks_per_round)
    if step.chunk_tokens is None or step.chunks_per_round is None:
        several = 1
        while several < _SPARE_ROUNDS and several * 2 * _SPARE_ROUNDS <= rounds:
            several *= 2
        rounds = ceil(rounds / several) * several
    return workload.chunk_tokens * workload.chunks_per_round * rounds


def _shortened(workload: Workload) -> Workload:
    """Rounds of few chunks instead, with no more work per token: quick to bound."""
    per_sequence = min(workload.chunks_per_sequence, _MOST_CHUNKS_BOUNDED)
    sequences = min(workload.chunks_per_round, _MOST_CHUNKS_BOUNDED) // per_sequence
    return Workload(
        seq_len=min(workload.seq_len, workload.chunk_tokens * per_sequence),
        chunk_tokens=workload.chunk_tokens,
        chunks_per_round=per_sequence * sequences,
        rounds_per_step=PROGRAM_ROUNDS,
    )


def _round_and_beyond_s(
    spec: ModelSpec, workload: Workload, step: TrainingStep, machine: Machine, caps: Caps
) -> tuple[float, float]:
    """Seconds of a further round, and of a step beyond its rounds, by the lower bound."""
    recipe = step.recipe.model_copy(update={"optimizer": optimizer_place("optimal")})
    chain = lower(spec, workload, recipe)
    some = lower_bound(chain, machine, caps, num_rounds=_MANY_ROUNDS)
    more = lower_bound(chain, machine, caps, num_rounds=2 * _MANY_ROUNDS)
    if some is None or more is None:
        return _round_and_beyond_s(spec, workload, step, machine, Caps())
    round_s = (more.step_s - some.step_s) / _MANY_ROUNDS
    return round_s, max(0.0, some.step_s - _MANY_ROUNDS * round_s)


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
        bounded, left_out = self._bounded()
        found = self._plans(bounded, _PLANNED)
        best_s = min((plan.step_ns for plan, _ in found), default=inf) / 1e9
        if best_s > _FAR * min((b.bound.step_s for b in bounded), default=inf):
            more, left_out = self._all_bounded(left_out), []
            found += self._plans(more, _PLANNED)
            bounded += more
        if not found:
            bounded += self._all_bounded(chunkings(self.spec, self.step))
            found = self._plans(bounded, len(bounded), thorough=True)
        for plan, cut in sorted(found, key=lambda pair: pair[0].step_ns):
            chain = lower(self.spec, cut.workload, self.recipe)
            try:
                schedule = plan.make(chain).model_copy(update={"policy": "optimal"})
            except (InfeasiblePlan, DoesNotFit):
                continue
            least_s = min(b.bound.step_s for b in bounded)
            if left_out:  # theirs may be less, but by no more than this
                least_s /= _WORTH_BOUNDING
            return finished(schedule, chain, as_step_bound(cut.bound, family_step_s=least_s))
        return self._last_resort()

    def _plans(
        self, bounded: list[_Bounded], most: int, *, thorough: bool = False
    ) -> list[tuple[Plan, _Bounded]]:
        """Plans for the first of the workloads that have any, as long as others may be faster."""
        found: list[tuple[Plan, _Bounded]] = []
        for tried, cut in enumerate(bounded):
            best_ns = min((plan.step_ns for plan, _ in found), default=inf)
            worth_it = _WORTH_IT if len(cut.few.tasks) <= MANY_TASKS else _WORTH_IT_OF_MANY
            if found and (tried >= most or cut.bound.step_s * 1e9 * worth_it >= best_ns):
                break
            plans = optimal_plans(
                cut.few, self.machine, self.caps, self.judge,
                num_rounds=cut.workload.rounds_per_step, bound_s=cut.bound.step_s,
                thorough=thorough,
            )  # fmt: skip
            found += [(plan, cut) for plan in plans]
        return found

    def _bounded(self) -> tuple[list[_Bounded], list[Workload]]:
        """Admissible workloads by their bounds, the least first; of nearly equal ones the shorter.

        Left out is what cannot be better than another's bound by half a percent, because its tasks
        alone take as long; it may still have a better plan.
        """
        found: list[_Bounded] = []
        left_out: list[Workload] = []
        least_s = inf
        for workload in admissible(self.spec, self.step):
            few = self._few_rounds(workload)
            if self._alone_s(few, workload) * _WORTH_BOUNDING >= least_s:
                left_out.append(workload)
                continue
            bounded = self._bound_of(workload, few)
            if bounded is not None:
                found.append(bounded)
                least_s = min(least_s, bounded.bound.step_s)
        near_s = _WORTH_IT * least_s
        found.sort(
            key=lambda f: (
                max(f.bound.step_s, near_s),
                len(f.few.tasks) if f.bound.step_s <= near_s else 0,
            )
        )
        return found, left_out

    def _few_rounds(self, workload: Workload) -> Chain:
        return lower(self.spec, _with_rounds(workload, JUDGED_ROUNDS), self.recipe)

    def _all_bounded(self, workloads: list[Workload]) -> list[_Bounded]:
        """Those of the workloads that have a bound, the least first."""
        found = [self._bound_of(workload, self._few_rounds(workload)) for workload in workloads]
        return sorted((b for b in found if b is not None), key=lambda b: b.bound.step_s)

    def _bound_of(self, workload: Workload, few: Chain) -> _Bounded | None:
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

    def _last_resort(self) -> Schedule:
        """The plan of `streaming` for the workload that takes the least memory.

        Raises:
            InfeasiblePlan: it does not fit, either; it says what would do for that workload.
        """
        workloads = [*admissible(self.spec, self.step), *chunkings(self.spec, self.step)]
        least = min(workloads, key=lambda w: (w.chunk_tokens * w.chunks_per_round, w.chunk_tokens))
        few = self._few_rounds(least)
        chain = lower(self.spec, least, self.recipe)
        judge, rounds = required(self.judge), least.rounds_per_step

        def fits(caps: Caps) -> bool:
            return has_plan(few, self.machine, caps, judge, num_rounds=rounds)

        try:
            schedule = plan_streaming(chain, self.machine, self.caps)
        except InfeasiblePlan as error:
            raise refused(few, self.caps, error, fits) from None
        schedule = schedule.model_copy(update={"policy": "optimal"})
        return finished(schedule, chain, step_bound(chain, self.machine, self.caps))


def _with_rounds(workload: Workload, most: int) -> Workload:
    rounds = min(workload.rounds_per_step, most)
    return workload.model_copy(update={"rounds_per_step": rounds})
