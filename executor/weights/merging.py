"""Adapters added to the weights they belong to, and adapter folders given out."""

from pathlib import Path

import torch
from pydantic import TypeAdapter

from twinstream.executor.kernels.base_codes import dequantized_group, quantized_group
from twinstream.executor.kernels.operand import DTYPES, KernelOperand
from twinstream.executor.kernels.vector.gradients import weight_views
from twinstream.executor.weights.carried_tensors.carried import CarriedTensors
from twinstream.executor.weights.durable_files import whole_folder, write_file, write_files, writing
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_folder import HfFolder, stored_tensors
from twinstream.executor.weights.hf_writer import HfOutline, add_weights
from twinstream.executor.weights.model_files import CONFIG, files_beside
from twinstream.executor.weights.peft.peft_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE,
    PeftFolder,
    base_of,
    low_rank_of,
    read_adapter,
)
from twinstream.executor.weights.traced.module_adapters import LORA_A, LORA_B, plain_adapters
from twinstream.executor.weights.traced.module_folder import loaded_module
from twinstream.executor.weights.traced.module_names import left_out, whole_of
from twinstream.models.adapters.adapter_layout import (
    adapter_group,
    adapter_layout,
    adapter_sites,
    expert_sites,
)
from twinstream.models.adapters.lora import Lora
from twinstream.models.adapters.peft_weights import peft_module
from twinstream.models.adapters.quantized_base import BaseFormat
from twinstream.models.hf.config import (
    Dtype,
    HfConfigError,
    UnsupportedConfigError,
    read_json_object,
    stated_dtype,
)
from twinstream.models.hf_weights import HfWeight, hf_weights_of
from twinstream.models.layout import EXPERTS
from twinstream.models.spec import ModelSpec
from twinstream.models.traced import ModuleSource
from twinstream.schedule.files import read_bytes, reason_of


def merge_adapters(
    spec: ModelSpec, lora: Lora, group: str, flat: torch.Tensor, adapters: torch.Tensor
) -> None:
    """Add scale B A to every target that a group has, in place: in float32, rounded once.

    Args:
        group: a layer by its number, or that of its experts.
        flat: the group's parameters, 1-D uint8 on the host, of the size of their layout.
        adapters: those of the layer, likewise.
    """
    layer = spec.layer_of(group)
    assert layer is not None
    built = spec.layer(layer)
    matrices = weight_views(
        KernelOperand(adapters, "read"), adapter_layout(built, lora), DTYPES[spec.dtype]
    )
    if group.endswith(EXPERTS):
        inside = weight_views(
            KernelOperand(flat, "update"), spec.group_layout(group), DTYPES[spec.dtype]
        )
        for of_all in expert_sites(built, lora):
            a_and_b = (matrices[f"{of_all.name}_{which}"] for which in "ab")
            for weight, a, b in zip(inside[of_all.name], *a_and_b, strict=True):
                _add_product(weight, a, b, lora.scale)
        return
    weights = {weight.name: weight for weight in hf_weights_of(spec, group)}
    for site in adapter_sites(built, lora):
        for number, target in enumerate(site.adapted):
            name = f"model.layers.{layer}.{peft_module(built, target)}.weight"
            a = matrices[f"{site.name}_a"][number * lora.rank : (number + 1) * lora.rank]
            _add_product(_view(spec, flat, weights[name]), a, matrices[f"{target}_b"], lora.scale)


def _add_product(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    weight.copy_(torch.addmm(weight.float(), b.float(), a.float(), alpha=scale))


def write_merged(destination: Path, base: HfFolder, adapters: PeftFolder) -> str | None:
    """Write the base with its adapters added, as a folder that transformers loads unedited.

    One group of weights is held at a time. It is there whole or not at all. Of adapters that were
    trained beside a base in few bits it is said how far that was from this one.

    Raises:
        WeightsError: a folder cannot be read or written, or the destination is there already.
    """
    spec, lora = base.spec, adapters.lora
    kept, off, total = _trained_beside(adapters.path), 0.0, 0.0

    def read_group(group: str) -> torch.Tensor:
        nonlocal off, total
        flat = torch.empty(spec.group_layout(group).size_bytes, dtype=torch.uint8)
        base.read_group(group, flat)
        adapters.put_saved(group, flat)
        if group.removesuffix(EXPERTS).isdigit():
            if kept is not None:
                layout, dtype = spec.group_layout(group), DTYPES[spec.dtype]
                coded = quantized_group(flat, layout, dtype, kept)
                was = dequantized_group(coded, layout, dtype, kept)
                for weight in hf_weights_of(spec, group):
                    if len(weight.shape) > 1:
                        now, then = (_view(spec, each, weight).double() for each in (flat, was))
                        off += float((then - now).square().sum())
                        total += float(now.square().sum())
            layer = spec.layer_of(group)
            assert layer is not None
            size_bytes = adapter_layout(spec.layer(layer), lora).size_bytes
            matrices = torch.empty(size_bytes, dtype=torch.uint8)
            if size_bytes:
                adapters.read_group(adapter_group(layer), matrices)
                merge_adapters(spec, lora, group, flat, matrices)
        return flat

    with whole_folder(destination) as folder:
        HfOutline.of(spec, base.path).write(folder, read_group)
    if kept is None:
        return None
    return (
        f"The adapter was trained beside a base in {kept}, which is off by "
        f"{(off / total) ** 0.5:.2%} of its matrices (root of mean squares); the adapter is added "
        f"to {base.path} as it is there."
    )


def _trained_beside(adapter: Path) -> BaseFormat | None:
    """How the base was kept; None where it was as it is."""
    if not (adapter / BASE).exists():
        return None
    try:
        return TypeAdapter(dict[str, BaseFormat]).validate_json(read_bytes(adapter / BASE))["base"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(adapter / BASE, f"does not say how the base was: {error}") from None


def write_merged_module(source: Path, destination: Path, base: Path, dtype: str | None) -> None:
    """Write a base with a PEFT folder's adapters added, as transformers writes it.

    In float32, rounded once; all weights are held. A base that is more than its text part is
    written as a whole, and what its class leaves out is written as it was. It is there whole or not
    at all.

    Raises:
        WeightsError: a folder cannot be read or written, or the adapters are of another base.
    """
    config, stored = plain_adapters(source)
    raw = read_json_object(base / CONFIG)
    whole, layers = whole_of(ModuleSource(config=raw)) if "text_config" in raw else (None, {})
    module = loaded_module(base, dtype or "auto", "the adapter's base", kind=whole)
    parameters = dict(module.named_parameters())
    scale = low_rank_of(source / ADAPTER_CONFIG, config).scale
    for layer in [name.removesuffix(LORA_A) for name in stored if name.endswith(LORA_A)]:
        a, b = stored[f"{layer}{LORA_A}"].float(), stored[f"{layer}{LORA_B}"].float()
        there = layer if f"{layer}.weight" in parameters else layers.get(layer, layer)
        weight = parameters.get(f"{there}.weight")
        added = scale * (b @ a)
        if weight is not None and type(module.get_submodule(there)).__name__ == "Conv1D":
            added = added.T
        if weight is None or weight.shape != added.shape:
            raise WeightsError(source, f"has adapters of {layer}, which {base} has not like that")
        weight.data.copy_(weight.float() + added)
    told = str(module.dtype).removeprefix("torch.")
    carried = CarriedTensors.of(left_out(module, stored_tensors(base), raw), told)
    with whole_folder(destination) as folder, writing(folder, 0):
        module.save_pretrained(folder)
        add_weights(folder, carried)
        write_files(folder, files_beside(base))


def copy_adapter(source: Path, destination: Path) -> None:
    """Copy the files of a PEFT folder that make the adapter; there whole or not at all.

    Raises:
        WeightsError: a folder cannot be read or written, the source is no plain LoRA, or the
            destination is there already.
    """
    read_adapter(source)
    with whole_folder(destination) as folder:
        with writing(folder, 0):
            folder.mkdir(parents=True)
        there = [BASE] if (source / BASE).exists() else []
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *there):
            try:
                content = read_bytes(source / name)
            except OSError as error:
                raise WeightsError(source / name, f"cannot be read: {reason_of(error)}") from None
            write_file(folder / name, content)


def export_adapter(
    source: Path, destination: Path, base: Path | None, *, merge: bool, dtype: Dtype | None = None
) -> str | None:
    """Give out a PEFT folder as it is, or merged into its base; what is to be said of it.

    Args:
        base: a Hugging Face folder, by default that which the adapter names.
        dtype: of what is merged, by default the base's.

    Raises:
        WeightsError: a folder cannot be read or written, or it is not known where the base is.
        HfConfigError: the base's config.json is missing or broken.
    """
    if not merge:
        copy_adapter(source, destination)
        return None
    found = base or _named_base(source)
    try:
        spec = ModelSpec.from_hf_config(found, dtype=dtype, longest=1)  # no sequence is run
    except UnsupportedConfigError:
        write_merged_module(source, destination, found, dtype)
        return None
    except HfConfigError as error:
        raise WeightsError(source, f"the base it is to be merged into: {error}") from None
    if spec.executor_refusal is not None:  # transformers computes it
        write_merged_module(source, destination, found, dtype)
        return None
    if dtype is None and stated_dtype(found) == "float16":
        raise WeightsError(
            found, "is in float16, which is not written: say what the merged model is to be in, "
            "--dtype bfloat16 or --dtype float32",
        )  # fmt: skip
    return write_merged(destination, HfFolder.open(found, spec), PeftFolder.open(source, spec))


def _named_base(source: Path) -> Path:
    named = base_of(source)
    if named is None:
        raise WeightsError(
            source / ADAPTER_CONFIG, "names no base model; say where it is: --base FOLDER"
        )
    if not Path(named).is_dir():
        raise WeightsError(
            source / ADAPTER_CONFIG,
            f"names the base '{named}', which is no folder here; say where it is: --base FOLDER",
        )
    return Path(named)


def _view(spec: ModelSpec, flat: torch.Tensor, weight: HfWeight) -> torch.Tensor:
    return flat[weight.offset_bytes : weight.end_bytes].view(DTYPES[spec.dtype]).view(weight.shape)
