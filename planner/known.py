"""Plans that are known already: with more memory or a faster link, the answer is none slower.

A plan made within less memory, or for a slower link, runs there as it is. A search that begins
anew may still end at a slower one, by as much as its plans lie above the bound.
"""

from collections.abc import Sequence

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering import lower_again, model_ref
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import Choices
from twinstream.planner.chunking import TrainingStep
from twinstream.planner.judge import Judge
from twinstream.planner.plan import finished, recipe_of, step_bound
from twinstream.planner.policies.ml_dataflow import POLICY as SEED_POLICY
from twinstream.schedule.document import Schedule, StepBound
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.verify import require_safe
from twinstream.schedule.verify_layout import arena_bytes
from twinstream.schedule.workload import Workload


class KnownPlanError(TwinstreamError):
    """A known plan is of something else than what is planned."""


def require_same_step(
    known: Sequence[Schedule], spec: ModelSpec, step: TrainingStep, policy: str, choices: Choices
) -> None:
    """Refuse plans of something else than what is to be planned.

    Args:
        known: plans for any machine and any caps.
        spec: the model.
        step: with its tokens per step.
        policy: by name.
        choices: what is fixed.

    Raises:
        KnownPlanError: a plan is of another model, recipe, step or policy, or prefetch is fixed.
    """
    if known and choices.prefetch_blocks is not None:
        raise KnownPlanError("how early a known plan loads is not known: fix no prefetch beside it")
    recipe = recipe_of(policy, step.recipe).model_dump(mode="json")
    for plan in known:
        cut = plan.workload
        for what, wanted, found in (
            ("model", model_ref(spec), plan.model),
            ("recipe", plan.recipe if policy == SEED_POLICY else recipe, plan.recipe),
            ("policy", policy, plan.policy),
            ("tokens per step", step.tokens_per_step, cut.tokens_per_step),
            ("sequence length", step.seq_len, cut.seq_len),
            ("sequence lengths", _repeated(step, cut), cut.sequence_lengths),
            ("chunk tokens", step.chunk_tokens or cut.chunk_tokens, cut.chunk_tokens),
            ("chunks per round", step.chunks_per_round or cut.chunks_per_round,
             cut.chunks_per_round),
            ("fixed choices", choices.told, () if plan.bound is None else plan.bound.fixed),
        ):  # fmt: skip
            if wanted != found:
                raise KnownPlanError(
                    f"the known plan differs in {what}: {_told(found)}, not {_told(wanted)}; only "
                    "a plan of the same training step can stand in for this one"
                )


def _repeated(step: TrainingStep, cut: Workload) -> tuple[int, ...]:
    """The step's unequal lengths, as often as a chunk has room for them."""
    lengths = step.sequence_lengths
    return lengths * (cut.chunk_tokens // sum(lengths)) if lengths else ()


def _told(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(getattr(value, "name", value) or "none")


def fastest_of(
    planned: Schedule, known: Sequence[Schedule], machine: Machine, judge: Judge
) -> Schedule:
    """The fastest of a plan and of those known before that fit its caps.

    One that was known comes back with the caps, the machine and the bounds of what was asked, safe
    and conforming. Of equally fast ones it is the new plan.

    Args:
        planned: what was planned for this machine.
        known: for other machines or within other caps, of the same step.
        machine: what step times are judged on.
        judge: a simulator of that machine.

    Raises:
        UnsafeSchedule: a known plan is not safe.
    """
    fitting = [other for other in known if _fits(other, planned)]
    if not fitting:
        return planned
    for other in fitting:
        require_safe(other)
    best = min((planned, *fitting), key=lambda plan: judge(plan).step_ns)
    return planned if best is planned else _adopted(best, planned, machine)


def _adopted(known: Schedule, planned: Schedule, machine: Machine) -> Schedule:
    """The known plan as an answer to what was asked."""
    caps = planned.caps.model_copy(update={"library_bytes": known.caps.library_bytes})
    schedule = known.model_copy(update={"caps": caps, "machine": planned.machine})
    chain = lower_again(known)
    bound = step_bound(chain, machine, caps)
    if bound is not None and planned.bound is not None:
        bound = bound.model_copy(update=_of_the_family(bound, planned.bound))
    return finished(schedule, chain, bound)


def _of_the_family(bound: StepBound, planned: StepBound) -> dict[str, object]:
    """What holds of all ways to cut the step."""
    family_s = planned.family_step_s
    least_s = None if family_s is None else min(family_s, bound.step_s)
    return {"family_step_s": least_s, "fixed": planned.fixed}


def _fits(known: Schedule, planned: Schedule) -> bool:
    """Whether its arenas do, beside what the device's reserve and libraries take."""
    caps = planned.caps.model_copy(update={"library_bytes": known.caps.library_bytes})
    for tier in (DEVICE, HOST):
        cap = caps.arena_bytes(tier.kind)
        if cap is not None and arena_bytes(known, tier) > cap:
            return False
    return True
