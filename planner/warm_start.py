"""Warm starts: a plan that is known already may be the answer.

A plan made within less memory, or for a slower link, runs as it is with more, or on a faster one.
A search that begins anew may still end at a slower plan, by as much as plans lie above the bound.
"""

from twinstream.models.kernel_costs.attention_shape import lengths_text
from twinstream.planner.policies import policy_named
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.workload import ModelRef, Packing, Workload


class WarmStartError(TwinstreamError):
    """A known plan is one of another step than the request's.

    Args:
        plan: the known one.
        name: by which the message begins.
        why: what of it is not as asked.
    """

    def __init__(self, plan: RankSchedule, name: str, why: str) -> None:
        self.plan, self.why = plan, why
        super().__init__(f"{name} {why}")


def fits(known: RankSchedule, caps: Caps) -> bool:
    """Whether a plan's arenas fit, beside the device's reserve and its libraries' memory."""
    caps = caps.model_copy(update={"library_bytes": known.caps.library_bytes})
    for tier in (DEVICE, HOST):
        cap = caps.arena_bytes(tier.kind)
        if cap is not None and arena_bytes(known, tier) > cap:
            return False
    return True


def require_same_step(known: RankSchedule, request: PlanRequest, number: int | None) -> None:
    """Refuse a known plan that is not one of the requested step.

    Args:
        known: a known plan.
        asked: prepared, with tokens per step.
        number: of the plan, where there are several.

    Raises:
        WarmStartError: it says what differs.
    """
    name = "the known plan" if number is None else f"known plan {number}"
    if request.policy == "optimal" and request.choices.prefetch_blocks is not None:
        why = "does not tell how early it loads: fix no prefetch beside it"
        raise WarmStartError(known, name, why)
    step, cut = request.step, known.workload
    for what, new, old in (
        ("policy", request.policy, known.policy),
        ("model", request.spec.ref(), known.model),
        ("sequence length", step.seq_len, cut.seq_len),
        ("what it computes", "a training step", _computed(cut)),
        ("packing", step.packing_of(cut.chunk_tokens), cut.packing),
        ("tokens per step", step.tokens_per_step, cut.tokens_per_step),
        ("chunk tokens", step.chunk_tokens or cut.chunk_tokens, cut.chunk_tokens),
        ("chunks per round", step.chunks_per_round or cut.chunks_per_round, cut.chunks_per_round),
        *_recipes(known, request),
        ("fixed choices", request.choices.fixed, () if known.bound is None else known.bound.fixed),
    ):
        if new != old:
            raise WarmStartError(
                known,
                name,
                f"differs in {what}: {_text(old)}, not {_text(new)}; only a plan of the same "
                "training step can stand in for this one",
            )


def _recipes(known: RankSchedule, request: PlanRequest) -> list[tuple[str, object, object]]:
    """Return the parts of both recipes by name; a policy may have a recipe of its own."""
    if request.policy != DEFAULT_POLICY and policy_named(request.policy).own_step:
        return []
    recipe = request.recipe.model_dump(mode="json")
    return [
        (f"the recipe's {name}", recipe.get(name), known.recipe.get(name))
        for name in sorted({*recipe, *known.recipe})
    ]


def _computed(cut: Workload) -> str:
    return "the forward of one alone" if cut.forward_only else "a training step"


def _text(value: object) -> str:
    if isinstance(value, ModelRef):
        return f"{value.name} ({value.content_hash})"
    if isinstance(value, Packing):
        told = lengths_text(value.expected_lengths)
        return f"{told} in room for {value.most_sequences} sequences"
    if isinstance(value, tuple):
        return "; ".join(value) or "none"
    if value is None:
        return "none"
    return f"{value:,}" if type(value) is int else str(value)
