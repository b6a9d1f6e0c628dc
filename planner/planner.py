"""The planner itself: from a request to a proven schedule with its bound."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from twinstream.models.lowering.lower import lower, lower_again
from twinstream.models.providers.trained import trained_groups
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.choices import OPEN, ChoiceError
from twinstream.planner.evaluator import Evaluator
from twinstream.planner.infeasible import DriveUse, InfeasiblePlan
from twinstream.planner.limits import SearchLimits
from twinstream.planner.policies import ON_DEVICE, policy_named
from twinstream.planner.proof import proven, step_bound
from twinstream.planner.refuse.refusal import refusal, smallest_workload, unnamed_refusal
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, caps_of
from twinstream.planner.reuse import Reuse
from twinstream.planner.rules.streaming import plan_streaming
from twinstream.planner.search.cut_planner import CutPlanner
from twinstream.planner.search.cuts import Cuts, StepCut
from twinstream.planner.search.search import search
from twinstream.planner.search.tokens import proposed_tokens
from twinstream.planner.update_places import (
    groups_on_host,
    likely_splits,
    placed_as,
    placed_updates,
    require_on_host,
)
from twinstream.planner.warm_start import fits, require_same_step
from twinstream.schedule.document import Caps, RankSchedule, Schedule, UpdatePlan
from twinstream.schedule.proof.verify import require_safe_rank
from twinstream.schedule.workload import MachineRef, Workload

_MOST_SPLITS = 2  # of the updates, that are planned beside all on the device and all on the host


class Planner:
    """Plans training steps, and keeps what their plans have in common.

    Args:
        evaluator: a simulator; `optimal` asks it how long a schedule takes.
        limits: of the search.
    """

    def __init__(self, evaluator: Evaluator, limits: SearchLimits = SearchLimits()) -> None:  # noqa: B008
        self.evaluator, self.limits, self.reuse = evaluator, limits, Reuse()

    def plan(
        self, request: PlanRequest, known: Sequence[Schedule] = (), *, name_caps: bool = True
    ) -> Schedule:
        """Return a verified, conforming schedule of one device's step, with its lower bounds.

        `optimal` chooses the cut with the least step time, and where the recipe clips, whether the
        updates end a step or begin the next; every other policy takes the preferred one that fits.
        Where the step leaves tokens per step open, `proposed_tokens` says how many,
        for every policy alike.

        Args:
            request: what to plan.
            known: plans of the same step, for other machines or within other caps. One of them is
                the answer where it fits and is faster, or nothing else fits.
            name_caps: whether a refusal of `optimal` names caps that would do, which takes longest.

        Raises:
            ChunkingError: what is fixed of the step contradicts itself.
            UnknownPolicyError: the message lists the policies there are.
            ChoiceError: something is fixed that the chain lacks, or that only `optimal` decides.
            WarmStartError: a known plan is of another model, recipe, step or policy.
            UnsafeSchedule: a known plan is not safe.
            InfeasiblePlan: the caps are too small for the policy; it says what would do.
            NoTimeError: the step takes no time on the machine.
        """
        plans = [one.only for one in known]
        with gc_paused():
            request = self.prepared(request, plans)
            for number, plan in enumerate(plans, start=1):
                require_same_step(plan, _placed_as(plan, request), number if plans[1:] else None)
            fitting = [plan for plan in plans if fits(plan, request.caps)]
            try:
                planned = self._planned(request, name_caps=name_caps and not fitting)
            except InfeasiblePlan as error:
                refused = _of_machine(error, request)
            else:
                return Schedule.of_rank(self.fastest_of(planned, fitting, request))
            if fitting:
                return Schedule.of_rank(self.fastest_of(None, fitting, request))
        try:
            raise refused  # out here: raised there it would keep all that led to it
        finally:
            del refused  # or this frame and the error would hold each other, and the planner

    def fastest_of(
        self, planned: RankSchedule | None, known: Sequence[RankSchedule], request: PlanRequest
    ) -> RankSchedule:
        """Return the fastest of a new plan and the known plans that fit; if equal, the new one.

        One that was known comes back with the caps, the machine and the bounds of the request.

        Raises:
            UnsafeSchedule: a known plan is not safe.
        """
        fitting = [plan for plan in known if fits(plan, request.caps)]
        plans = [*([] if planned is None else [planned]), *fitting]
        if plans == [planned]:
            return plans[0]
        for plan in fitting:
            require_safe_rank(plan)
        best = min(plans, key=lambda plan: self.evaluator(plan, request.machine).step_ns)
        return best if best is planned else self._as_answer(best, request)

    def prepared(self, request: PlanRequest, known: Sequence[RankSchedule] = ()) -> PlanRequest:
        """Return the request with nothing left open but what its policy decides.

        That is kernels, the place of the optimizer, and tokens per step: those of a known plan, or
        as many as `proposed_tokens` says. `optimal` chooses the place where the recipe clips.
        """
        if request.policy == DEFAULT_POLICY:
            places, own_step = ON_DEVICE, False
        else:
            policy = policy_named(request.policy)
            places, own_step = policy.optimizer, policy.own_step
            if request.choices != OPEN:
                raise ChoiceError(
                    f"policy '{request.policy}' decides by its own rules; homes, levels, prefetch "
                    "and effort can be fixed of 'optimal' only"
                )
        if request.step.tokens_per_step is None and known:
            request = request.with_tokens(known[0].workload.tokens_per_step)
        if request.step.tokens_per_step is None and not own_step:
            tokens = proposed_tokens(request.with_optimizer(ON_DEVICE))
            request = request.with_tokens(tokens)
        if own_step:
            return request
        is_optimal = request.policy == DEFAULT_POLICY
        if request.choices.optimizer != "recipe" or (is_optimal and request.recipe.uses_host):
            require_on_host(request)
        if request.choices.optimizer == "host":
            request = placed_updates(request, trained_groups(request.spec, request.recipe))
        placed = request.placed(places)
        return request if len(placed) > 1 and request.policy == DEFAULT_POLICY else placed[0]

    def _planned(self, request: PlanRequest, *, name_caps: bool) -> RankSchedule:
        if request.choices.optimizer == "auto":
            return self._with_updates_placed(request, name_caps=name_caps)
        if request.policy == DEFAULT_POLICY:
            plain = self._without_disk(request)
            try:
                placed = request.placed(ON_DEVICE)
                found = self._optimally_placed(placed, name_caps=name_caps and not plain)
            except InfeasiblePlan:
                if not plain:
                    raise
                return self.fastest_of(None, plain, request)
            return self.fastest_of(found, plain, request)
        schedule, chain = policy_named(request.policy).plan(request)
        return proven(schedule, chain, step_bound(chain, request.machine, request.caps))

    def _with_updates_placed(self, request: PlanRequest, *, name_caps: bool) -> RankSchedule:
        """The fastest plan with all updates on the device, all on the host, or a likely split.

        Where none fits, the refusal is that of all on the device.
        """
        groups = trained_groups(request.spec, request.recipe)
        opened, steps_s = self._cuts(request), list[float | None]()
        plans: list[tuple[float, RankSchedule]] = []
        kinds = [(), groups, *likely_splits(placed_updates(request), opened)[:_MOST_SPLITS]]
        refused: InfeasiblePlan | None = None
        for split in kinds:
            placed = placed_updates(request, split)
            try:
                plan = self._planned(placed, name_caps=False)
            except InfeasiblePlan as error:
                refused, step_s = refused or error, None
            else:
                step_s = self.evaluator(plan, request.machine).step_ns / 1e9
                plans.append((step_s, plan))
            steps_s.append(step_s)
        if not plans:
            if name_caps:
                return self._planned(placed_updates(request), name_caps=True)
            assert refused is not None, "a plan or a refusal"
            raise refused
        _, best = min(plans, key=lambda one: one[0])
        places = UpdatePlan(
            groups=len(groups),
            groups_on_host=groups_on_host(Recipe.model_validate(best.recipe), groups),
            device_step_s=steps_s[0],
            host_step_s=steps_s[1],
        )
        return self._within_any(best.model_copy(update={"places": places}), opened)

    def _within_any(self, plan: RankSchedule, opened: Cuts) -> RankSchedule:
        """The plan with the least bound over all places of the updates."""
        assert plan.bound is not None, "plans of `optimal` have one"
        least_s = opened.step_bound_of(plan.workload).family_step_s
        bound = plan.bound.model_copy(update={"family_step_s": least_s})
        return plan.model_copy(update={"bound": bound})

    def _without_disk(self, request: PlanRequest) -> list[RankSchedule]:
        """Of a request with a disk, the plan without it, if that fits: a disk makes none slower."""
        if request.caps.disk_bytes is None:
            return []
        caps = request.caps.model_copy(update={"disk_bytes": None})
        placed = replace(request, caps=caps).placed(ON_DEVICE)
        try:
            return [self._optimally_placed(placed, name_caps=False)]
        except InfeasiblePlan:
            return []

    def _optimally_placed(self, placed: Sequence[PlanRequest], *, name_caps: bool) -> RankSchedule:
        """The fastest plan of requests that differ in the optimizer's place alone.

        Where none fits, the refusal is that of the first.
        """
        plans: list[RankSchedule] = []
        for request in reversed(placed):
            is_last = request is placed[0]
            try:
                plans.append(self._optimal(request, name_caps=name_caps and is_last and not plans))
            except InfeasiblePlan:
                if is_last and not plans:
                    raise
        if len(plans) == 1:
            return plans[0]
        best = min(plans, key=lambda plan: self.evaluator(plan, placed[0].machine).step_ns)
        families = [plan.bound.family_step_s for plan in plans if plan.bound is not None]
        least_s = min(family_s for family_s in families if family_s is not None)
        assert best.bound is not None, "plans of `optimal` have one"
        bound = best.bound.model_copy(update={"family_step_s": least_s})
        return best.model_copy(update={"bound": bound})

    def _optimal(self, request: PlanRequest, *, name_caps: bool) -> RankSchedule:
        cuts = self._cuts(request)
        if (found := search(cuts, self.evaluator)) is not None:
            schedule, chain = found
            bound = cuts.step_bound_of(chain.workload)
            return proven(schedule.model_copy(update={"policy": "optimal"}), chain, bound)
        streams = request.choices.open and not request.recipe.uses_host
        if streams and cuts.is_possible:
            workload = smallest_workload(cuts)
            chain = lower(request.spec, workload, request.recipe)
            try:
                schedule = plan_streaming(chain, request.machine, request.caps)
            except InfeasiblePlan:
                pass
            else:
                bound = cuts.step_bound_of(workload)
                return proven(schedule.model_copy(update={"policy": "optimal"}), chain, bound)
        if not name_caps:
            raise unnamed_refusal(cuts)
        raise refusal(cuts, partial(self._fits, request))

    def _fits(self, request: PlanRequest, cut: Workload, caps: Caps) -> bool:
        """Whether decisions of one cut are found that fit other caps."""
        cuts = self._cuts(replace(request, caps=caps))
        bound = cuts.bound(cut)
        return bound is not None and CutPlanner(cuts, StepCut(cut, bound), self.evaluator).fits()

    def _as_answer(self, known: RankSchedule, request: PlanRequest) -> RankSchedule:
        """Return the known plan as an answer to the request."""
        chain, machine, placed = lower_again(known), request.machine, _placed_as(known, request)
        caps = request.caps.model_copy(update={"library_bytes": known.caps.library_bytes})
        reference = MachineRef(name=machine.name, content_hash=machine.content_hash)
        schedule = known.model_copy(update={"caps": caps, "machine": reference})
        if request.policy != DEFAULT_POLICY:
            return proven(schedule, chain, step_bound(chain, machine, caps))
        answer = proven(schedule, chain, self._cuts(placed).step_bound_of(known.workload))
        if request.choices.optimizer != "auto":
            return answer
        return self._within_any(answer, self._cuts(request))

    def _cuts(self, request: PlanRequest) -> Cuts:
        return Cuts(request, self.reuse, self.limits)


def _placed_as(known: RankSchedule, request: PlanRequest) -> PlanRequest:
    """The request with the optimizer where a known plan has it, if that may be."""
    if request.policy != DEFAULT_POLICY:
        return request
    was, trained = Recipe.model_validate(known.recipe), trained_groups(request.spec, request.recipe)
    there, asked = ([r.updates_on_host(g) for g in trained] for r in (was, request.recipe))
    if request.choices.optimizer == "auto" or (was.uses_host and there == asked):
        return placed_as(request, was)  # documents of before list all groups
    placed = request.placed(ON_DEVICE)
    alike = (each for each in placed if each.recipe.optimizer == known.recipe.get("optimizer"))
    return next(alike, placed[0])


def _of_machine(error: InfeasiblePlan, request: PlanRequest) -> InfeasiblePlan:
    """The refusal, of a machine with so much memory and a step that is cut as the user said."""
    step, machine = request.step, request.machine
    cut = {"--chunk-tokens": step.chunk_tokens, "--chunks-per-round": step.chunks_per_round}
    device, host = (
        None if memory is None else memory.value
        for memory in (machine.device_memory_bytes, machine.host_memory_bytes)
    )
    fixed = [flag for flag, value in cut.items() if value is not None]
    usual = caps_of(machine, None, None)
    given = [
        side
        for side, cap, default in (
            ("device", request.caps.device_bytes, usual.device_bytes),
            ("host", request.caps.host_bytes, usual.host_bytes),
        )
        if cap != default
    ]
    return error.on(device, host, fixed, _leaner_options(request), given, drive=_drive_use(request))


def _drive_use(request: PlanRequest) -> DriveUse:
    """How a drive could help that there is none of: what it holds has no need of host memory."""
    recipe, caps = request.recipe, request.caps
    of_two = request.machine.pool_bytes is None and request.policy == DEFAULT_POLICY
    if not of_two or caps.disk_bytes is not None or caps.host_bytes is None:
        return None
    is_frozen = bool(recipe.lora or recipe.frozen or request.spec.own_lora)
    return "read" if is_frozen else "written"


def _leaner_options(request: PlanRequest) -> list[str]:
    """Options that were not given, with which a step takes less memory."""
    recipe, found = request.recipe, list[str]()
    if request.spec.own_code is not None:
        return found
    if recipe.update == "adamw" and recipe.optimizer_state != "8bit" and recipe.lora is None:
        found.append("--optimizer-state 8bit")
    if recipe.lora is None and not recipe.frozen:
        found.append("--lora r=16")
    if recipe.base == "model" and not recipe.frozen:
        found.append("--base nf4" if recipe.lora is not None else "--lora r=16 --base nf4")
    return found


@contextmanager
def gc_paused(*, cycles: bool = True) -> Iterator[None]:
    """Planning makes millions of small objects, few of them in cycles; looking takes a quarter.

    Those are found at the end, by one look at what was made meanwhile and at nothing older; without
    `cycles` there are none, and all of it counts as old without a look.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            if cycles:
                gc.collect(1)
            else:
                gc.freeze()
                gc.unfreeze()
