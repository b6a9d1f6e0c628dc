"""Plans that are known already: the answer is not slower than any of them that fits.

A plan made within less memory, or for a slower link, runs as it is with more, or on a faster one.
A search that begins anew may still end at a slower plan, by as much as plans lie above the bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.demand.attention_shape import lengths_text
from twinstream.models.lowering.lower import lower_again, model_ref
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.plan import finished, recipe_of, step_bound
from twinstream.planner.search.chunking import TrainingStep
from twinstream.planner.search.family import Family
from twinstream.planner.seed_system.policy import POLICY as SEED_POLICY
from twinstream.planner.step_plan import plan_step, policy_names
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.verify import require_safe
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.workload import MachineRef, ModelRef, Workload


class KnownPlanError(TwinstreamError):
    """A known plan is of something else than what is to be planned.

    Args:
        plan: the known one.
        name: by which the message begins.
        why: what of it is not as asked.
    """

    def __init__(self, plan: Schedule, name: str, why: str) -> None:
        self.plan, self.why = plan, why
        super().__init__(f"{name} {why}")


@dataclass(frozen=True)
class Asked:
    """What is to be planned; `judge` is a simulator of the machine."""

    spec: ModelSpec
    step: TrainingStep
    machine: Machine
    caps: Caps
    policy: str
    judge: Judge
    choices: Choices = OPEN

    def planned(self, *, name_caps: bool = True) -> Schedule:
        """As `plan_step`."""
        return plan_step(
            self.spec, self.step, self.machine, self.caps, self.policy, self.judge, self.choices,
            name_caps=name_caps,
        )  # fmt: skip


def plan_knowing(asked: Asked, known: Sequence[Schedule], *, name_caps: bool = True) -> Schedule:
    """Plan, and take a known plan instead if it fits the caps and is faster, or nothing else fits.

    Tokens per step that are open are those of the known plans.

    Args:
        asked: what to plan.
        known: for other machines or within other caps, of the same step.
        name_caps: whether a refusal names caps that would do.

    Raises:
        KnownPlanError: a known plan is of another model, recipe, step or policy.
        UnsafeSchedule: a known plan is not safe.
        TwinstreamError: as `plan_step`.
    """
    if not known or asked.policy not in policy_names():
        return asked.planned(name_caps=name_caps)
    if asked.step.tokens_per_step is None:
        tokens = known[0].workload.tokens_per_step
        asked = replace(asked, step=replace(asked.step, tokens_per_step=tokens))
    for number, plan in enumerate(known, start=1):
        _require_same_step(plan, asked, f"known plan {number}" if known[1:] else "the known plan")
    fitting = [plan for plan in known if fits(plan, asked.caps)]
    try:
        planned = asked.planned(name_caps=name_caps and not fitting)
    except InfeasiblePlan:
        if not fitting:
            raise
        return _fastest(fitting, asked)
    return fastest_of(planned, known, asked)


def fastest_of(planned: Schedule, known: Iterable[Schedule], asked: Asked) -> Schedule:
    """The fastest of a plan of what was asked and of known plans of the same step that fit.

    One that was known comes back with the caps, the machine and the bounds of what was asked, safe
    and conforming. Of equally fast ones it is the new plan.

    Raises:
        UnsafeSchedule: a known plan is not safe.
    """
    fitting = [plan for plan in known if fits(plan, asked.caps)]
    return _fastest([planned, *fitting], asked, new=planned) if fitting else planned


def _fastest(plans: Sequence[Schedule], asked: Asked, new: Schedule | None = None) -> Schedule:
    for plan in plans:
        if plan is not new:
            require_safe(plan)
    best = min(plans, key=lambda plan: asked.judge(plan).step_ns)
    return best if best is new else _adopted(best, asked)


def _adopted(known: Schedule, asked: Asked) -> Schedule:
    """The known plan as an answer to what was asked."""
    chain, machine = lower_again(known), asked.machine
    caps = asked.caps.model_copy(update={"library_bytes": known.caps.library_bytes})
    reference = MachineRef(name=machine.name, content_hash=machine.content_hash)
    schedule = known.model_copy(update={"caps": caps, "machine": reference})
    if asked.policy == "optimal":
        family = Family(asked.spec, asked.step, machine, asked.judge, asked.choices, asked.caps)
        return finished(schedule, chain, family.step_bound_of(known.workload))
    return finished(schedule, chain, step_bound(chain, machine, caps))


def fits(known: Schedule, caps: Caps) -> bool:
    """Whether its arenas fit, beside the device's reserve and what its libraries take."""
    caps = caps.model_copy(update={"library_bytes": known.caps.library_bytes})
    for tier in (DEVICE, HOST):
        cap = caps.arena_bytes(tier.kind)
        if cap is not None and arena_bytes(known, tier) > cap:
            return False
    return True


def _require_same_step(known: Schedule, asked: Asked, name: str) -> None:
    """Refuse a plan of something else than what is to be planned."""
    if asked.policy == "optimal" and asked.choices.prefetch_blocks is not None:
        why = "does not tell how early it loads: fix no prefetch beside it"
        raise KnownPlanError(known, name, why)
    step, cut = asked.step, known.workload
    for what, wanted, found in (
        ("policy", asked.policy, known.policy),
        ("model", model_ref(asked.spec), known.model),
        ("sequence length", step.seq_len, cut.seq_len),
        ("sequence lengths", _repeated(step, cut), cut.sequence_lengths),
        ("tokens per step", step.tokens_per_step, cut.tokens_per_step),
        ("chunk tokens", step.chunk_tokens or cut.chunk_tokens, cut.chunk_tokens),
        ("chunks per round", step.chunks_per_round or cut.chunks_per_round, cut.chunks_per_round),
        *_recipes(known, asked),
        ("fixed choices", asked.choices.told, () if known.bound is None else known.bound.fixed),
    ):
        if wanted != found:
            raise KnownPlanError(
                known,
                name,
                f"differs in {what}: {_told(found)}, not {_told(wanted)}; only a plan of the same "
                "training step can stand in for this one",
            )


def _recipes(known: Schedule, asked: Asked) -> list[tuple[str, object, object]]:
    """The parts of both recipes; `ml_dataflow` has one of its own, whatever the step's."""
    if asked.policy == SEED_POLICY:
        return []
    recipe = recipe_of(asked.policy, asked.step.recipe).model_dump(mode="json")
    return [
        (f"the recipe's {name}", recipe.get(name), known.recipe.get(name))
        for name in sorted({*recipe, *known.recipe})
    ]


def _repeated(step: TrainingStep, cut: Workload) -> tuple[int, ...]:
    """The step's unequal lengths, as often as a chunk has room for them."""
    lengths = step.sequence_lengths
    return lengths * (cut.chunk_tokens // sum(lengths)) if sum(lengths) > 0 else ()


def _told(value: object) -> str:
    if isinstance(value, ModelRef):
        return f"{value.name} ({value.content_hash})"
    if isinstance(value, tuple):
        whole = all(isinstance(part, int) for part in value)
        return (lengths_text(value) if whole else "; ".join(value)) or "none"
    return f"{value:,}" if type(value) is int else str(value)
