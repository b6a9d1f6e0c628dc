"""The state that a run begins or goes on with: weights, optimizer, buffers."""

from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING

from twinstream.models.providers.trained import adapter_groups
from twinstream.models.recipes.recipe import Recipe
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.machine import Tell
from twinstream.training.model_opening import OpenedModel
from twinstream.training.options import TrainOptions

if TYPE_CHECKING:
    from twinstream.executor.providers.provider import Weights
    from twinstream.executor.state.sources import Optimizer
    from twinstream.executor.weights.traced.module_folder import Buffers


def starting_state(
    model: OpenedModel, options: TrainOptions, recipe: Recipe, checkpoint: Checkpoint | None,
    tell: Tell, left_out: Collection[str] = (),
) -> tuple["Weights", "Optimizer"]:  # fmt: skip
    """The state before the first step that is left.

    Args:
        left_out: groups of a folder that are on a disk already.
        tell: takes a line on what is made anew.

    Raises:
        WeightsError: a file has gone or changed.
    """
    from twinstream.executor.state.sources import fresh_optimizer, kept_optimizer
    from twinstream.executor.weights.checkpoint_files import CheckpointFiles

    weights = _weights(model, options, recipe, checkpoint, tell, left_out)
    if checkpoint is None:
        return weights, fresh_optimizer(model.spec, recipe)
    files = CheckpointFiles(checkpoint.path)
    return weights, kept_optimizer(files)


def starting_buffers(model: OpenedModel, checkpoint: Checkpoint | None) -> "Buffers":
    """Of a traced model the buffers that its folder has, or the checkpoint of one without.

    Raises:
        WeightsError: a file has gone or changed.
    """
    from twinstream.executor.providers.registry import provider_of

    spec, folder = model.spec, model.folder
    if folder is None and checkpoint is not None and spec.own_lora is None:
        folder = checkpoint.path
    return {} if folder is None else provider_of(spec).buffers(folder, spec)


def _weights(
    model: OpenedModel, options: TrainOptions, recipe: Recipe, checkpoint: Checkpoint | None,
    tell: Tell, left_out: Collection[str],
) -> "Weights":  # fmt: skip
    """Of the base, and of adapters beside it: a checkpoint has what is trained."""
    from twinstream.executor.providers.registry import provider_of
    from twinstream.executor.state.sources import in_their_base
    from twinstream.executor.state.training_state import fresh_adapters

    spec, base = model.spec, model.folder
    provider = provider_of(spec)
    has_adapters = bool(adapter_groups(spec, recipe))
    if checkpoint is not None and not has_adapters:
        base = checkpoint.path
    if base is None:
        parameters = in_their_base(provider.fresh(spec, options.seed), spec, recipe)
    else:
        parameters = provider.parameters(base, spec, recipe, options.output, tell, left_out)
    adapter = options.adapter if checkpoint is None else checkpoint.path
    if not has_adapters or adapter is None:
        return chain(parameters, fresh_adapters(spec, options.seed, recipe))
    return provider.with_adapters(adapter, spec, parameters)
