"""Traced modules: other people's code runs them, and their weights are as transformers has them."""

from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path

import torch

from twinstream.executor.kernels.operand import Kernel
from twinstream.executor.modules.building import has_own_loss, require_own_class
from twinstream.executor.program.module_programs import ModulePrograms
from twinstream.executor.providers.provider import Outline, Provider, Tell, Weights
from twinstream.executor.weights.hf_folder import stored_tensors
from twinstream.executor.weights.traced.module_adapters import read_module_adapters
from twinstream.executor.weights.traced.module_folder import (
    ModuleOutline,
    read_module_buffers,
    read_module_parameters,
)
from twinstream.executor.weights.traced.module_weights import fresh_module_parameters
from twinstream.models.lowering.traced_step import MODULE_KERNELS
from twinstream.models.providers.traced import TracedModel
from twinstream.models.recipes.recipe import Recipe


class Modules(Provider):
    """Models of a list of somebody's blocks."""

    def kernel(self, model: TracedModel, key: str, programs: ModulePrograms) -> Kernel:
        is_part = key.startswith(MODULE_KERNELS)
        return programs.kernel(model, key) if is_part else super().kernel(model, key, programs)

    def fresh(self, model: TracedModel, seed: int) -> Weights:
        return fresh_module_parameters(model, seed)

    def has_own_loss(self, model: TracedModel) -> bool:
        return has_own_loss(model.source)

    def require_savable(self, model: TracedModel) -> None:
        require_own_class(model.source)

    def check(self, folder: Path, model: TracedModel, *, has_weights: bool) -> None:
        if has_weights:
            stored_tensors(folder)

    def parameters(
        self, folder: Path, model: TracedModel, recipe: Recipe, run: Path | None, tell: Tell,
        left_out: Collection[str] = (),
    ) -> Weights:  # fmt: skip
        groups = read_module_parameters(folder, model)
        return ((group, flat) for group, flat in groups if group not in left_out)

    def with_adapters(self, folder: Path, model: TracedModel, base: Weights) -> Weights:
        return chain(base, read_module_adapters(folder, model))

    def buffers(self, folder: Path, model: TracedModel) -> Mapping[str, torch.Tensor]:
        return read_module_buffers(folder, model)

    def outline(
        self, model: TracedModel, like: Path | None, recipe: Recipe, base: str | None
    ) -> Outline:
        return ModuleOutline.of(model, like, base)
