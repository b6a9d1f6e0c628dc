"""Lower (model, workload, recipe) to the task chain of one training step."""

from twinstream.models.flops import SavedLevel, saved_bytes_per_token
from twinstream.models.kernel_costs.attention_library import library_bytes
from twinstream.models.lowering.declarations import carried_or_used
from twinstream.models.lowering.decoder import DecoderLowering
from twinstream.models.lowering.step import StepLowering
from twinstream.models.lowering.traced_step import TracedLowering
from twinstream.models.model import AnyModel, model_of, node_in
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.models.traced import TracedModel
from twinstream.schedule.chain import Chain
from twinstream.schedule.derived.flush import flush_chain
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload


def lower(model: AnyModel, workload: Workload, recipe: Recipe | None = None) -> Chain:
    """The chain of one training step of `model` on `workload`, or of its forward alone.

    A recipe that clips has the optimizer on the device after the whole backward pass, unless it
    names the beginning of the next step. What is frozen has no gradient, and backward ends where
    nothing below is trained. The tasks of a forward alone are named as those of the step; the
    head's makes nothing but the loss. It has the optimizer's state, too, which it leaves as it is.

    Raises:
        TwinstreamError: the recipe clips, and has the optimizer on the host; or it leaves nothing
            to train; or its loss is of pairs, which the chunks cannot hold.
    """
    recipe = settled(recipe or Recipe())
    require_pairs(model, workload, recipe)
    lowering = step_lowering(model, workload, recipe)
    lowering.run()
    builder = lowering.builder
    return Chain(
        tensors=carried_or_used(builder, workload, lowering.shapes.persistent),
        calls=builder.calls,
        tasks=tuple(builder.tasks),
        recomputes=tuple(builder.recomputes),
        inputs=tuple(builder.inputs),
        outputs=tuple(builder.outputs),
        persistent=lowering.shapes.persistent,
        round_starts=tuple(lowering.round_starts),
        workload=workload,
        model=model.ref(),
        recipe=lowering.recipe.model_dump(mode="json"),
        model_flops=lowering.model_flops(),
        library_bytes=max(map(library_bytes, builder.calls.values()), default=0),
    )


def step_lowering(model: AnyModel, workload: Workload, recipe: Recipe) -> StepLowering:
    """What adds the tasks of a model's step."""
    kind = DecoderLowering if isinstance(model, ModelSpec) else TracedLowering
    return kind(model, workload, recipe)  # type: ignore[arg-type]


def require_pairs(model: AnyModel, workload: Workload, recipe: Recipe) -> None:
    """
    Raises:
        TwinstreamError: the loss is of pairs, and the model or its chunks have none.
    """
    if recipe.dpo is None:
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
    if isinstance(model, TracedModel) and not model.is_packed:
        raise TwinstreamError(
            f"'{model.name}' does not keep packed documents apart, and the loss of pairs (dpo) "
            "needs both of a pair in one chunk"
        )


def saved_per_token(model: AnyModel) -> int:
    """Bytes that a block keeps of a token for its backward pass where nothing is recomputed."""
    if isinstance(model, ModelSpec):
        return saved_bytes_per_token(model, SavedLevel.FULL)
    return model.saved_bytes_per_token


def settled(recipe: Recipe) -> Recipe:
    """With kernels, and with the optimizer where the recipe can have it."""
    changes: dict[str, object] = {"kernels": recipe.implementations}
    if not recipe.places_among((recipe.optimizer,)):
        if recipe.optimizer != "device":
            raise TwinstreamError(
                f"the optimizer '{recipe.optimizer}' cannot clip: the norm of all gradients is "
                'made on the device; lower with Recipe(optimizer="device_after_backward")'
            )
        changes["optimizer"] = "device_after_backward"
    return recipe.model_copy(update=changes)


def lower_again(schedule: Schedule) -> Chain:
    """The chain that a schedule was planned for, from what the schedule says of itself.

    One that consumes is the flush of a chain: its updates alone.

    Raises:
        TwinstreamError: the schedule's model or recipe is not one that this version knows.
    """
    recipe = node_in(schedule.recipe, Recipe, "recipe")
    chain = lower(model_of(schedule.model), schedule.workload, recipe)
    return flush_chain(chain) if schedule.consumed else chain
