"""A run in stretches of steps, each with a schedule of its own, and where its state begins."""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from twinstream.models.recipe import Recipe
from twinstream.models.traced import TracedModel
from twinstream.models.trained import adapter_groups
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.machine import Tell
from twinstream.training.model_opening import OpenedModel
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.planning import plan_again
from twinstream.training.preparing import Prepared
from twinstream.training.ranks.planning import Plan

if TYPE_CHECKING:
    from twinstream.executor.state.sources import Optimizer, Weights
    from twinstream.executor.weights.traced.module_folder import Buffers


@dataclass(frozen=True)
class TrainingSegment:
    """Steps `first` to `last` by one plan."""

    first: int
    last: int
    plan: Plan

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe


def segments(prepared: Prepared, done: int) -> list[TrainingSegment]:
    """What is left after so many steps: all by one plan, or the last steps with a master.

    Raises:
        OptionsError: a tail is asked for that changes nothing.
        InfeasiblePlan: the master does not fit the caps.
    """
    options, last = prepared.options, prepared.num_steps
    tail, dtype = options.fp32_tail, prepared.model.spec.dtype
    kind = prepared.recipe.state_of(dtype)
    if tail and dtype == "float32":
        raise OptionsError("fp32_tail: a float32 model is its own master; leave it out")
    if tail and prepared.recipe.update != "adamw":
        raise OptionsError("fp32_tail: a float32 master is of AdamW; leave it out")
    if not tail or kind == "float32_master":
        return [TrainingSegment(done + 1, last, prepared.plan)] if done < last else []
    with_master = prepared.recipe.model_copy(update={"optimizer_state": "float32_master"})
    plan = plan_again(
        options, prepared.here, prepared.model.spec, with_master, prepared.plan.workload
    )
    begin = max(0, last - tail)
    found = [
        TrainingSegment(done + 1, begin, prepared.plan),
        TrainingSegment(max(done, begin) + 1, last, plan),
    ]
    return [segment for segment in found if segment.first <= segment.last]


def starting_state(
    model: OpenedModel, options: TrainOptions, recipe: Recipe, checkpoint: Checkpoint | None,
    tell: Tell,
) -> tuple["Weights", "Optimizer"]:  # fmt: skip
    """The state before a segment's first step.

    Args:
        recipe: of the segment.
        tell: takes a line on what is made anew.

    Raises:
        WeightsError: a file has gone or changed.
    """
    from twinstream.executor.state.sources import fresh_optimizer, kept_optimizer
    from twinstream.executor.weights.checkpoint_files import CheckpointFiles

    weights = _weights(model, options, recipe, checkpoint, tell)
    if checkpoint is None:
        return weights, fresh_optimizer(model.spec, recipe)
    files = CheckpointFiles(checkpoint.path)
    return weights, kept_optimizer(files, model.spec, checkpoint.state.recipe, recipe)


def starting_buffers(model: OpenedModel, checkpoint: Checkpoint | None) -> "Buffers":
    """Of a traced model the buffers that its folder has, or the checkpoint of one without.

    Raises:
        WeightsError: a file has gone or changed.
    """
    from twinstream.executor.weights.traced.module_folder import read_module_buffers

    spec, folder = model.spec, model.folder
    if not isinstance(spec, TracedModel):
        return {}
    if folder is None and checkpoint is not None and spec.source.lora is None:
        folder = checkpoint.path
    return {} if folder is None else read_module_buffers(folder, spec)


def _weights(
    model: OpenedModel, options: TrainOptions, recipe: Recipe, checkpoint: Checkpoint | None,
    tell: Tell,
) -> "Weights":  # fmt: skip
    """Of the base, and of adapters beside it: a checkpoint has what is trained."""
    from twinstream.executor.state.sources import in_their_base, read_adapters, read_parameters
    from twinstream.executor.state.training_state import fresh_adapters, fresh_parameters
    from twinstream.executor.weights.hf_folder import HfFolder
    from twinstream.executor.weights.peft.peft_folder import PeftFolder
    from twinstream.executor.weights.traced.module_adapters import read_module_adapters
    from twinstream.executor.weights.traced.module_folder import read_module_parameters

    spec, base = model.spec, model.folder
    has_adapters = bool(adapter_groups(spec, recipe))
    if checkpoint is not None and not has_adapters:
        base = checkpoint.path
    if base is None:
        parameters = in_their_base(fresh_parameters(spec, options.seed), spec, recipe)
    elif isinstance(spec, TracedModel):
        parameters = read_module_parameters(base, spec)
    else:
        parameters = read_parameters(HfFolder.open(base, spec), recipe, options.output, tell)
    adapter = options.adapter if checkpoint is None else checkpoint.path
    if not has_adapters or adapter is None:
        return chain(parameters, fresh_adapters(spec, options.seed, recipe))
    if isinstance(spec, TracedModel):
        return chain(parameters, read_module_adapters(adapter, spec))
    return read_adapters(PeftFolder.open(adapter, spec), parameters)
