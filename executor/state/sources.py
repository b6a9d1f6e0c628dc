"""Where the state of a run comes from: drawn, given as a Hugging Face folder, or a checkpoint."""

from collections.abc import Iterator
from typing import Protocol

import torch

from twinstream.executor.kernels.codes import decoded
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.state.training_state import (
    fresh_optimizer_state,
    fresh_parameters,
    put_carried,
)
from twinstream.executor.weights.checkpoint_files import CheckpointFiles
from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.models.demand.workspace import code_blocks, state_bytes
from twinstream.models.layout import group_layout, parameter_groups
from twinstream.models.lowering.declarations import optimizer_parts
from twinstream.models.recipe import OptimizerState, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Schedule


class StateSource(Protocol):
    """Gives a state a group at a time, so that no second copy of it is held."""

    def groups(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, flat parameters and optimizer state of each group, 1-D uint8 on the host."""


def fill_from(schedule: Schedule, arenas: Arenas, source: StateSource) -> None:
    """Put a state into every carried slot.

    Raises:
        WeightsError: a file has gone or changed.
    """
    for group, parameters, optimizer in source.groups():
        put_carried(schedule, arenas, f"param.{group}", parameters)
        put_carried(schedule, arenas, f"opt.{group}", optimizer)


class FreshState:
    """Random weights by a seed."""

    def __init__(self, spec: ModelSpec, seed: int, recipe: Recipe) -> None:
        self._spec, self._seed, self._recipe = spec, seed, recipe

    def groups(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for group, flat in fresh_parameters(self._spec, self._seed):
            yield group, flat, fresh_optimizer_state(self._spec, group, flat, self._recipe)


class GivenWeights:
    """The weights of a Hugging Face folder, nothing learned yet."""

    def __init__(self, folder: HfFolder, recipe: Recipe) -> None:
        self._folder, self._recipe = folder, recipe

    def groups(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        spec = self._folder.spec
        for group, flat in _weights(self._folder):
            yield group, flat, fresh_optimizer_state(spec, group, flat, self._recipe)


class CheckpointState:
    """What a checkpoint has; where the run goes on with a float32 master, that is made.

    A master begins as the parameters are; m and v keep their values, in float32.
    """

    def __init__(self, folder: HfFolder, files: CheckpointFiles, was: Recipe, now: Recipe) -> None:
        self._folder, self._files = folder, files
        self._was, self._now = was, now

    def groups(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        spec = self._folder.spec
        was, now = self._was.state_of(spec.dtype), self._now.state_of(spec.dtype)
        for group, flat in _weights(self._folder):
            state = self._files.read(f"opt.{group}")
            if was != now:
                assert now == "float32_master", f"{was} cannot become {now}"
                state = _with_master(spec, group, flat, state, was)
            yield group, flat, state


def _weights(folder: HfFolder) -> Iterator[tuple[str, torch.Tensor]]:
    for group in parameter_groups(folder.spec):
        flat = torch.empty(group_layout(folder.spec, group).size_bytes, dtype=torch.uint8)
        folder.read_group(group, flat)
        yield group, flat


def _with_master(
    spec: ModelSpec, group: str, parameters: torch.Tensor, state: torch.Tensor, was: OptimizerState
) -> torch.Tensor:
    """m, v and master of each part, float32, from its state of another kind."""
    values, found = parameters.view(DTYPES[spec.dtype]), []
    begin = 0
    for part in optimizer_parts(spec, group):
        size = state_bytes(was, spec.dtype, part.num_elements)
        m, v = _moments(state[begin : begin + size], part.num_elements, was, spec)
        begin += size
        inside = values[part.element_offset : part.element_offset + part.num_elements]
        found += [m, v, inside.float()]
    return torch.cat(found).view(torch.uint8)


def _moments(
    state: torch.Tensor, count: int, was: OptimizerState, spec: ModelSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    if was == "model":
        m, v = state.view(DTYPES[spec.dtype]).view(2, count)
        return m.float(), v.float()
    m, v = state[: 2 * count].view(2, count)
    scales = state[2 * count :].view(torch.float32).view(2, code_blocks(count))
    return decoded(m, scales[0], signed=True), decoded(v, scales[1], signed=False)
