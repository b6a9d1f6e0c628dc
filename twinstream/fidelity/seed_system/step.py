"""Plan a training step as the seed system would: its own cut of the step, for its own GPUs."""

from twinstream.fidelity.seed_system.classes import machine_class
from twinstream.fidelity.seed_system.policy import NAME, emit_seed, seed_chain
from twinstream.fidelity.seed_system.sizing import RoundSizes, RoundsRule, size_step, sizes_of_round
from twinstream.models.kernel_costs.attention_shape import lengths_text
from twinstream.models.recipe import Recipe
from twinstream.planner.policies import Policy
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import MachineRef

_NO_LIMIT_BYTES = 2**62


class OtherCutError(TwinstreamError):
    """The step is fixed to be cut in another way than the seed system cuts it."""


class OtherRecipeError(TwinstreamError):
    """The recipe names kernels or dtypes that the seed system does not have."""


def plan_seed_step(request: PlanRequest) -> tuple[RankSchedule, Chain]:
    """The seed system's schedule of a step, and its chain.

    The device cap is the arena's: the machine's reserve is taken off. Tokens per step that are
    left open follow its rule for the optimizer's share. Its recipe replaces the step's: constants
    of AdamW and the place of the optimizer are its own, whatever is asked for; kernels and dtypes
    of gradients and state that it does not have are refused.

    Raises:
        OtherRecipeError: the recipe names other kernels than torch's own, float32 gradients,
            clipping, LoRA, frozen parameters, or an optimizer state of another dtype than the
            model's.
        UnknownMachineClass: it has no constants for the machine.
        OtherCutError: lengths, chunks, rounds or tokens are fixed otherwise than it cuts a step.
        SizingRefused: it would not run within the caps.
        UnsuitableModel: it trains models in bf16 with an LM head of their own, and no others.
    """
    spec, step, machine, caps = request.decoder, request.step, request.machine, request.caps
    if step.packing is not None:
        raise OtherCutError(
            f"policy '{NAME}' packs sequences of one length, not of "
            f"{lengths_text(step.packing.expected_lengths)} tokens: plan with another policy"
        )
    _require_its_recipe(step.recipe)
    constants = machine_class(machine.name)
    device_bytes = caps.arena_bytes("device")
    sizing = size_step(
        spec,
        step.seq_len,
        constants,
        host_bytes=_NO_LIMIT_BYTES if caps.host_bytes is None else caps.host_bytes,
        device_bytes=_NO_LIMIT_BYTES if device_bytes is None else device_bytes,
        rounds=_rounds(step, sizes_of_round(spec, step.seq_len, constants)),
    )
    chain = seed_chain(spec, sizing.workload)
    ref = MachineRef(name=machine.name, content_hash=machine.content_hash)
    return emit_seed(spec, chain, sizing, ref).model_copy(update={"caps": caps}), chain


def _require_its_recipe(recipe: Recipe) -> None:
    kernels = recipe.implementations
    if (kernels.vector, kernels.attention) != ("eager", "eager"):
        raise OtherRecipeError(
            f"policy '{NAME}' is planned with eager kernels, not {kernels.vector} and attention "
            f"{kernels.attention}: leave out --kernels and --attention"
        )
    if recipe.gradients == "float32" or recipe.optimizer_state != "model":
        raise OtherRecipeError(
            f"policy '{NAME}' adds gradients up, and has the optimizer's state, in the model's "
            "dtype: leave out --gradients and --optimizer-state"
        )
    if recipe.lora or recipe.frozen:
        raise OtherRecipeError(
            f"policy '{NAME}' trains all parameters: leave out --lora and --freeze, or plan with "
            "another policy"
        )
    if recipe.clips:
        raise OtherRecipeError(f"policy '{NAME}' does not clip gradients: plan with another policy")


def _rounds(step: TrainingStep, sizes: RoundSizes) -> RoundsRule | int:
    fixed = {
        "--chunk-tokens": (step.chunk_tokens, sizes.chunk_tokens),
        "--chunks-per-round": (step.chunks_per_round, sizes.chunks_per_round),
    }
    for flag, (given, own) in fixed.items():
        if given not in (None, own):
            raise OtherCutError(f"policy '{NAME}' has {flag} {own} here, not {given}: leave it out")
    if step.tokens_per_step is None:
        return "v2"
    round_tokens = sizes.chunk_tokens * sizes.chunks_per_round
    rounds, left = divmod(step.tokens_per_step, round_tokens)
    if left or not rounds:
        raise OtherCutError(
            f"policy '{NAME}' has rounds of {round_tokens:,} tokens here, and --tokens-per-step "
            f"{step.tokens_per_step:,} is not a multiple of it"
        )
    return rounds


POLICY = Policy(NAME, plan_seed_step, own_step=True)
