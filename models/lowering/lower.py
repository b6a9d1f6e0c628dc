"""Lower (model, workload, recipe) to the task chain of one training step, of a device or of ranks.

On ranks a model's blocks are whole tasks where twinstream's kernels compute them. Where the recipe
has a library's, which are priced and not run here, they are split at what ranks say inside them.
"""

from collections.abc import Mapping
from typing import Any

from twinstream.models.kernel_costs.attention_library import library_bytes
from twinstream.models.lowering.declarations import carried_or_used
from twinstream.models.lowering.decoder import DecoderLowering
from twinstream.models.lowering.priced.chain import lower_priced
from twinstream.models.lowering.settled import require_pairs, settled
from twinstream.models.lowering.stage import lower_stage
from twinstream.models.lowering.stage_cut import stage_cut
from twinstream.models.lowering.step import StepLowering
from twinstream.models.lowering.traced_step import TracedLowering
from twinstream.models.model import AnyModel, model_of, node_in, require_decoder
from twinstream.models.parallel.job import Job
from twinstream.models.parallel.layout import Layout
from twinstream.models.recipe import Recipe
from twinstream.schedule.chain import Chain
from twinstream.schedule.derived.flush import flush_chain
from twinstream.schedule.document import Schedule
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
    if layout is None:
        return _of_one_device(model, workload, recipe)
    decoder = require_decoder(model)
    is_split = layout.tp * layout.cp * layout.ep > 1
    if folded or is_split or recipe.implementations.vector == "megatron":
        return lower_priced(Job.of_step(decoder, workload, recipe, layout), stage, folded=folded)
    cut = stage_cut(layout, model.num_layers, workload, stage)
    return lower_stage(decoder, workload, recipe, cut)


def _of_one_device(model: AnyModel, workload: Workload, recipe: Recipe) -> Chain:
    recipe = settled(recipe)
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
    lowering: StepLowering = LOWERINGS[model.provider](model, workload, recipe)
    return lowering


def saved_per_token(model: AnyModel) -> int:
    """Bytes that a block keeps of a token for its backward pass where nothing is recomputed."""
    return int(LOWERINGS[model.provider].saved_per_token(model))


def lower_again(schedule: Schedule) -> Chain:
    """The chain that a schedule was planned for, from what the schedule says of itself.

    One that consumes is the flush of a chain: its updates alone.

    Raises:
        TwinstreamError: the schedule's model or recipe is not one that this version knows.
    """
    recipe = node_in(schedule.recipe, Recipe, "recipe")
    chain = lower(model_of(schedule.model), schedule.workload, recipe)
    return flush_chain(chain) if schedule.consumed else chain
