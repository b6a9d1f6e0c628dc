"""From options to all that a run on several ranks needs before its first step."""

from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from twinstream.clusters.layout import LayoutError
from twinstream.data.training_data import TrainingData
from twinstream.models.recipe import OptimizerPlace, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.workload import Workload
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.machine import Here
from twinstream.training.opening import Model, open_data
from twinstream.training.options import TrainOptions
from twinstream.training.planning import StepPlan, recipe_of
from twinstream.training.preparing import (
    Opened,
    Tell,
    gone_on_with,
    outline_for,
    rate_of,
    require_unread,
    resolved,
    steps_wanted,
)
from twinstream.training.ranks.planning import RanksPlan, planned_for_ranks, slices_of, workload_of


@dataclass(frozen=True, kw_only=True)
class RanksPrepared(Opened):
    """All that is known before the first step; nothing has been written yet."""

    eval_data: TrainingData | None
    plan: RanksPlan

    @property
    def step_plan(self) -> StepPlan:
        """The plan of all ranks."""
        return self.plan

    @property
    def notes(self) -> list[str]:
        """What to know before it starts."""
        found = super().notes
        if self.plan.layout.dp > 1:
            found.append(
                f"note: gradients are summed over {self.plan.layout.dp} replicas in their order: "
                "the data is that of one device, and the bits are those of this dp"
            )
        return found


def prepare_ranks(
    options: TrainOptions, here: Here, model: Model, checkpoint: Checkpoint | None, tell: Tell
) -> RanksPrepared:
    """Everything before the first step.

    Raises:
        TwinstreamError: something cannot be used; nothing has been written.
    """
    tell("reading the data")
    data, eval_data = open_data(options, model)
    start_s = perf_counter()
    tell(f"planning {model.spec.name} for {options.ranks} ranks on {here.machine.name}")
    if checkpoint is None:
        recipe = recipe_of(options, here, model.spec)
        workload = workload_of(options, here, model.spec, recipe, data)
    else:
        checkpoint.require_model(model.spec)
        data = gone_on_with(data, checkpoint, options)
        recipe, workload = checkpoint.state.recipe, checkpoint.state.workload
    outline = outline_for(model, recipe)
    # where updates are made does not change their bits; ranks make them after the backward pass
    place: OptimizerPlace = "device_after_backward" if recipe.clips else "device"
    recipe = recipe.model_copy(update={"optimizer": place})
    fixed = checkpoint is not None or options.chunk_tokens is not None
    plan = _planned(options, here, model.spec, recipe, workload, fixed=fixed)
    if checkpoint is not None:
        require_unread(data, plan, checkpoint)
    recipe = Recipe.model_validate(plan.schedule.schedules["stage 0"].recipe)
    num_steps = steps_wanted(options, data, workload.tokens_per_step)
    options = resolved(options, here, model, recipe, workload, num_steps)
    return RanksPrepared(
        options=options, here=here, model=model, data=data, eval_data=eval_data,
        recipe=recipe, outline=outline, plan=plan, num_steps=num_steps,
        rate=rate_of(options, num_steps), plan_seconds=perf_counter() - start_s,
    )  # fmt: skip


def _planned(
    options: TrainOptions, here: Here, spec: ModelSpec, recipe: Recipe, workload: Workload, *,
    fixed: bool,
) -> RanksPlan:  # fmt: skip
    """With sequences in slices where they do not fit whole, unless chunks are fixed."""
    try:
        return planned_for_ranks(options, here, spec, recipe, workload)
    except LayoutError:
        for sliced in () if fixed else slices_of(workload):
            with suppress(LayoutError):
                return planned_for_ranks(options, here, spec, recipe, sliced)
        raise
