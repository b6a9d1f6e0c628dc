"""Decoders of our kernels: their weights are those of Hugging Face folders, adapters PEFT's."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.providers.provider import Extents, Outline, Provider, Tell, Weights
from twinstream.executor.weights.base_cache import BaseCache, in_base
from twinstream.executor.weights.durable_files import write_files
from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.executor.weights.hf_writer import HfOutline
from twinstream.executor.weights.model_files import tokenizer_files
from twinstream.executor.weights.peft.peft_folder import BASE, PeftFolder
from twinstream.executor.weights.peft.peft_writer import write_peft_folder
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import FlatLayout
from twinstream.models.providers.trained import adapter_groups, layout_of
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.recipe import Recipe

_INIT_STD = 0.02


class Decoders(Provider):
    """Models whose blocks are ours."""

    def fresh(self, model: ModelSpec, seed: int) -> Weights:
        """Normal, std 0.02; norms one; biases zero."""
        generator = torch.Generator().manual_seed(seed)
        for group in model.parameter_groups:
            yield group, _fresh(model.group_layout(group), DTYPES[model.dtype], generator)

    def require_savable(self, model: ModelSpec) -> None:
        """Folders of all of them can be written."""

    def check(self, folder: Path, model: ModelSpec, *, has_weights: bool) -> None:
        HfFolder.open(folder, model)

    def parameters(
        self, folder: Path, model: ModelSpec, recipe: Recipe, run: Path | None = None,
        tell: Tell = print, left_out: Collection[str] = (),
    ) -> Weights:  # fmt: skip
        source = HfFolder.open(folder, model)
        kept = None
        if run is not None and recipe.base != "model":
            kept = BaseCache.of_base(run, source, recipe, tell)
        for group in model.parameter_groups:
            if group in left_out:
                continue
            make = partial(_read, source, recipe, group)
            if kept is None or recipe.base_of(group) == "model":
                yield group, make()
            else:
                yield group, kept.of(group, make)

    def in_place(
        self, folder: Path, model: ModelSpec, recipe: Recipe, group: str
    ) -> Extents | None:
        if recipe.base_of(group) != "model":
            return None
        return HfFolder.open(folder, model).extents(group)

    def with_adapters(self, folder: Path, model: ModelSpec, base: Weights) -> Weights:
        """With what the folder has of the base, too."""
        source = PeftFolder.open(folder, model)
        for group, flat in base:
            source.put_saved(group, flat)
            yield group, flat
        recipe = Recipe(lora=source.lora)
        for group in adapter_groups(model, recipe):
            flat = torch.empty(layout_of(model, recipe, group).size_bytes, dtype=torch.uint8)
            source.read_group(group, flat)
            yield group, flat

    def lora_in(self, folder: Path, model: ModelSpec) -> Lora | None:
        return PeftFolder.open(folder, model).lora

    def outline(
        self, model: ModelSpec, like: Path | None, recipe: Recipe, base: str | None
    ) -> Outline:
        if recipe.lora is None:
            return HfOutline.of(model, like)
        told = {} if recipe.base == "model" else {BASE: json.dumps({"base": recipe.base}).encode()}
        return AdapterOutline(model, recipe.lora, base, tokenizer_files(like) | told)


@dataclass(frozen=True)
class AdapterOutline:
    """What is trained beside a frozen base, and all of its folder but the values.

    Attributes:
        base: the base's folder, so that PEFT finds it.
        files: tokenizer and so on, by name; and the format that the base was in.
    """

    spec: ModelSpec
    lora: Lora
    base: str | None
    files: Mapping[str, bytes]
    carried = None

    def write(self, folder: Path, read_group: Callable[[str], torch.Tensor]) -> None:
        """Write a folder that PEFT loads; the model, which is frozen, is not written."""
        write_peft_folder(folder, self.spec, self.lora, read_group, self.base)
        write_files(folder, self.files)


def _read(folder: HfFolder, recipe: Recipe, group: str) -> torch.Tensor:
    if recipe.base_of(group) == "nf4" and folder.has_nf4(group):
        return folder.read_nf4(group)
    flat = torch.empty(layout_of(folder.spec, Recipe(), group).size_bytes, dtype=torch.uint8)
    folder.read_group(group, flat)
    return in_base(folder.spec, recipe, group, flat)


def _fresh(layout: FlatLayout, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    flat = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for inner in layout.tensors:
        view = flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes].view(dtype)
        if inner.name.endswith("norm"):
            view.fill_(1.0)
        elif not inner.name.endswith("bias"):
            random = torch.empty(view.numel(), dtype=torch.float32)
            view.copy_(random.normal_(0.0, _INIT_STD, generator=generator))
    return flat
