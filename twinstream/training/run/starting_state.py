"""The state that a run begins or goes on with: weights, optimizer, buffers."""

from itertools import chain
from typing import TYPE_CHECKING

from twinstream.models.recipe import Recipe
from twinstream.models.traced import TracedModel
from twinstream.models.trained import adapter_groups
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.machine import Tell
from twinstream.training.model_opening import OpenedModel
from twinstream.training.options import TrainOptions

if TYPE_CHECKING:
    from twinstream.executor.state.sources import Optimizer, Weights
    from twinstream.executor.weights.traced.module_folder import Buffers


def starting_state(
    model: OpenedModel, options: TrainOptions, recipe: Recipe, checkpoint: Checkpoint | None,
    tell: Tell,
) -> tuple["Weights", "Optimizer"]:  # fmt: skip
    """The state before the first step that is left.

    Args:
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
    return weights, kept_optimizer(files)


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
