"""Adapters of a traced module as PEFT has them in a folder, both ways."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.weights.durable_files import write_file
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.peft.peft_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    low_rank_of,
    read_adapter_config,
    require_plain,
    tensors_of,
)
from twinstream.executor.weights.peft.peft_writer import adapter_config
from twinstream.executor.weights.safetensors_header import read_header
from twinstream.executor.weights.traced.module_names import layers_in_whole
from twinstream.executor.weights.traced.module_weights import flat_groups
from twinstream.models.layout import ADAPTERS
from twinstream.models.providers.traced import TracedModel
from twinstream.models.recipes.lora import ModuleLora

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_PEFT = "base_model.model."


def read_module_adapters(
    folder: Path, model: TracedModel
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """The groups of adapters of a PEFT folder, in the model's dtype.

    Raises:
        WeightsError: it is of other adapters than the model's.
    """
    (config, found), lora = plain_adapters(folder), model.source.lora
    assert lora is not None, "the model has adapters"
    told = low_rank_of(folder / ADAPTER_CONFIG, config)
    if told.options != lora.options:
        raise WeightsError(
            folder / ADAPTER_CONFIG, f"says {told.options}, and --lora says {lora.options}"
        )
    groups = [group for group in model.groups if group.name.startswith(ADAPTERS)]
    shapes = {tensor.name: tensor.shape for group in groups for tensor in group.tensors}
    path = folder / ADAPTER_WEIGHTS
    ours = {theirs: layer for layer, theirs in layers_in_whole(model).items()}
    found = {renamed(name, ours): tensor for name, tensor in found.items()}
    if more := sorted(set(found) - set(shapes)):
        raise WeightsError(path, f"has {some_of(more)} besides what --lora says")
    if wrong := [n for n, shape in shapes.items() if n not in found or found[n].shape != shape]:
        raise WeightsError(path, f"lacks {some_of(wrong)}, or has another shape of it")
    yield from flat_groups(model, found, adapters=True)


def lora_of_folder(folder: Path) -> ModuleLora:
    """The LoRA of an adapter, whatever its base is: its targets are the names of all layers.

    Whether it is a plain one is seen when it is read.

    Raises:
        WeightsError: a file is missing or broken, or it is no LoRA.
    """
    path = folder / ADAPTER_CONFIG
    config = read_adapter_config(folder)
    names = [name for name in read_header(folder / ADAPTER_WEIGHTS) if ".lora_" in name]
    layers = {name.rpartition(".lora_")[0] for name in names}
    targets = tuple(sorted({layer.rpartition(".")[2] for layer in layers}))
    if not targets:
        raise WeightsError(folder / ADAPTER_WEIGHTS, "has no LoRA matrices")
    return ModuleLora.model_validate({**dict(low_rank_of(path, config)), "targets": targets})


def renamed(name: str, layers: Mapping[str, str]) -> str:
    """The name of an adapter's matrix beside layers that have other names."""
    layer = name.rpartition(".lora_")[0]
    return f"{layers.get(layer, layer)}{name.removeprefix(layer)}"


def write_module_adapters(
    destination: Path, model: TracedModel, parameters: Mapping[str, torch.Tensor], base: str | None
) -> None:
    """Write adapters, by the names that they have in the module, as PEFT does."""
    from safetensors.torch import save_file

    tensors = {f"{_PEFT}{name}": tensor.contiguous() for name, tensor in parameters.items()}
    save_file(tensors, destination / ADAPTER_WEIGHTS)
    adapted = sorted(name.removesuffix(LORA_A) for name in parameters if name.endswith(LORA_A))
    assert model.source.lora is not None
    names = (tensor.name for group in model.groups for tensor in group.tensors)
    among_experts = any(".experts." in name for name in names)
    config = adapter_config(model.source.lora, adapted, base, among_experts=among_experts)
    write_file(destination / ADAPTER_CONFIG, config)


def plain_adapters(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and matrices of plain LoRA, by the names of the module's own parameters.

    Raises:
        WeightsError: it is another kind of adapter, or not whole.
    """
    config, path = _plain_config(folder), folder / ADAPTER_WEIGHTS
    low_rank_of(folder / ADAPTER_CONFIG, config)
    found = {name.removeprefix(_PEFT): one for name, one in tensors_of(folder).items()}
    layers = {name.removesuffix(ending) for name in found for ending in (LORA_A, LORA_B)}
    layers &= {name.rpartition(".lora_")[0] for name in found}
    whole = {f"{layer}{ending}" for layer in layers for ending in (LORA_A, LORA_B)}
    if wrong := sorted(whole ^ set(found)):
        raise WeightsError(path, f"is not lora_A and lora_B beside layers: {some_of(wrong)}")
    return config, found


def _plain_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of plain LoRA; whether weights are transposed is seen by their layers."""
    config = read_adapter_config(folder)
    known = {key: value for key, value in config.items() if key != "fan_in_fan_out"}
    require_plain(folder / ADAPTER_CONFIG, known)
    return config
