"""Lower (model, workload, recipe) to the task chain of one training step, of a device or of ranks.

On ranks a model's blocks are whole tasks where twinstream's kernels compute them, or tasks of parts
with tensor parallelism, or tasks around shared experts. Where the recipe has a library's kernels,
which are priced and not run here, they are split at what ranks say inside them.
"""

from collections.abc import Mapping
from typing import Any

from twinstream.models.kernel_costs.workspace import library_bytes
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.decoder import DecoderLowering
from twinstream.models.lowering.parts.expert_tasks import (
    ExpertTasks,
    SharedPartTasks,
    SharedRingTasks,
    SharedSequenceTasks,
)
from twinstream.models.lowering.parts.part_blocks import lower_in_parts
from twinstream.models.lowering.parts.part_tasks import PartTasks, runs_parts
from twinstream.models.lowering.parts.ring_tasks import RingTasks
from twinstream.models.lowering.parts.sequence_tasks import SequenceTasks
from twinstream.models.lowering.parts.token_tasks import TokenTasks
from twinstream.models.lowering.stage_cut import stage_cut
from twinstream.models.lowering.step import StepLowering
from twinstream.models.lowering.task_blocks import TaskBlocks
from twinstream.models.lowering.traced_step import TracedLowering
from twinstream.models.providers.model import AnyModel, model_of, node_in, require_decoder
from twinstream.models.providers.trained import require_trained
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.chain import Chain
from twinstream.schedule.derived.flush import flush_chain
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload

LOWERINGS: Mapping[str, Any] = {
    "decoder": DecoderLowering,
    "module": TracedLowering,
}
"""What adds the tasks of a model's step, by the model's provider."""


def lower(
    model: AnyModel, workload: Workload, recipe: Recipe | None = None,
    layout: Layout | None = None, stage: int = 0, *, folded: bool = False,
) -> Chain:  # fmt: skip
    """The chain of one training step of `model` on `workload`, or of its forward alone.

    With a layout it is what each rank of a stage does, communication included; `workload` is then
    the step of one replica.

    A recipe that clips has the optimizer on the device after the whole backward pass, unless it
    names the beginning of the next step. What is frozen has no gradient, and backward ends where
    nothing below is trained. The tasks of a forward alone are named as those of the step; the
    head's makes nothing but the loss. It has the optimizer's state, too, which it leaves as it is.

    Args:
        layout: None: of one device.
        folded: a layer is one task whatever is said inside it, for a search that times it by other
            means.

    Raises:
        TwinstreamError: the recipe clips, and has the optimizer on the host; or it leaves nothing
            to train; or its loss is of pairs, which the chunks cannot hold; or ranks cannot train
            by it.
    """
    recipe = recipe or Recipe()
    if not workload.forward_only:
        require_trained(model, recipe)
    if layout is None:
        return _chain(step_lowering(model, workload, _settled(model, workload, recipe)))
    decoder = require_decoder(model)
    runs_here = runs_parts(recipe) and not folded
    is_split = layout.tp * layout.cp * layout.ep > 1 and not runs_here
    if folded or is_split or recipe.implementations.vector == "megatron":
        return lower_in_parts(Job.of_step(decoder, workload, recipe, layout), stage, folded=folded)
    recipe = _settled(model, workload, recipe)
    cut = stage_cut(layout, decoder, workload, stage)
    return _chain(_blocks(layout, recipe)(decoder, workload, recipe, cut))


def _blocks(layout: Layout, recipe: Recipe) -> type[TaskBlocks]:
    """What adds the tasks of a stage by our own kernels: whole blocks unless these are named."""
    shares = layout.ep > 1
    if not runs_parts(recipe) or not (layout.in_parts or shares):
        return TaskBlocks
    if layout.cp > 1 and layout.cp_exchange == "ring":
        return SharedRingTasks if shares else RingTasks
    if layout.splits_sequences:
        return SharedSequenceTasks if shares else SequenceTasks
    if layout.token_slices > 1:
        return TokenTasks
    if layout.in_parts:
        return SharedPartTasks if shares else PartTasks
    return ExpertTasks


def _settled(model: AnyModel, workload: Workload, recipe: Recipe) -> Recipe:
    """Return the recipe with kernels, and with the optimizer where the recipe can have it."""
    changes: dict[str, object] = {"kernels": recipe.implementations}
    if not recipe.places_among((recipe.optimizer,)):
        if recipe.optimizer != "device":
            raise TwinstreamError(
                f"the optimizer '{recipe.optimizer}' cannot clip: the norm of all gradients is "
                'made on the device; lower with Recipe(optimizer="device_after_backward")'
            )
        changes["optimizer"] = "device_after_backward"
    recipe = recipe.model_copy(update=changes)
    _require_pairs(model, workload, recipe)
    return recipe


def _require_pairs(model: AnyModel, workload: Workload, recipe: Recipe) -> None:
    """
    Raises:
        TwinstreamError: the loss is of pairs, and the model or its chunks have none.
    """
    if recipe.loss.sides == 1:
        return
    require_packs(model)
    if not workload.most_pairs:
        raise TwinstreamError(
            "the loss of pairs (dpo) needs both sequences of a pair packed in one chunk, and a "
            f"chunk of {workload.chunk_tokens:,} tokens has no room for two: give it twice the "
            "tokens of the longest sequence"
        )


def require_packs(model: AnyModel) -> None:
    """
    Raises:
        TwinstreamError: the model cannot have both documents of a pair in one chunk.
    """
    if not model.is_packed:
        raise TwinstreamError(
            f"'{model.name}' does not keep packed documents apart, and the loss of pairs (dpo) "
            "needs both of a pair in one chunk"
        )


def _chain(lowering: StepLowering) -> Chain:
    lowering.run()
    builder, tensors = lowering.builder, lowering.tensors()
    names = {tensor.tensor_id for tensor in tensors}
    return Chain(
        tensors=tensors,
        calls=builder.calls,
        tasks=tuple(builder.tasks),
        recomputes=tuple(builder.recomputes),
        inputs=tuple(fed for fed in builder.inputs if fed.tensor in names),
        outputs=tuple(builder.outputs),
        persistent=lowering.shapes.persistent,
        round_starts=tuple(lowering.round_starts),
        workload=lowering.workload,
        model=lowering.shapes.spec.ref(),
        recipe=lowering.recipe.model_dump(mode="json"),
        model_flops=lowering.model_flops(),
        library_bytes=max(map(library_bytes, builder.calls.values()), default=0),
    )


def step_lowering(model: AnyModel, workload: Workload, recipe: Recipe) -> StepLowering:
    """What adds the tasks of a model's step."""
    lowering: StepLowering = LOWERINGS[model.provider](model, workload, recipe)
    return lowering


def saved_per_token(model: AnyModel) -> int:
    """Bytes that a block keeps of a token for its backward pass where nothing is recomputed."""
    return int(LOWERINGS[model.provider].saved_per_token(model))


def lower_again(schedule: RankSchedule) -> Chain:
    """The chain that a schedule was planned for, from what the schedule says of itself.

    One that consumes is the flush of a chain: its updates alone.

    Raises:
        TwinstreamError: the schedule's model or recipe is not one that this version knows.
    """
    recipe = node_in(schedule.recipe, Recipe, "recipe")
    chain = lower(model_of(schedule.model), schedule.workload, recipe)
    return flush_chain(chain) if schedule.consumed else chain
