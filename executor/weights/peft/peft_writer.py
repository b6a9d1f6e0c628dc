"""Flat adapters to a folder that PEFT loads."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from twinstream.executor.weights.durable_files import make_room, sync, write_file, writing
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.peft.peft_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from twinstream.executor.weights.weight_file import WeightFile
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.recipes.adapter_layout import adapter_group, adapter_sites
from twinstream.models.recipes.lora import Lora, LowRank
from twinstream.models.recipes.peft_weights import (
    EXPERT_PARAMETERS,
    peft_module,
    peft_weights,
    peft_weights_of,
    saved_weights,
)

# PEFT 0.21 takes modules of these names for the routed experts of a family whose experts were
# modules once, wherever they are and however target_modules spells them: they are spelled as the
# parameters that they hold.
_OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def write_peft_folder(
    destination: Path,
    spec: ModelSpec,
    lora: Lora,
    read_group: Callable[[str], torch.Tensor],
    base: str | None = None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors as PEFT does.

    Everything is on the disk when this returns. Where it raises, the folder is incomplete: write
    to a temporary name and rename.

    Args:
        read_group: gives the flat adapters of `lora.LAYER`, and groups that are trained whole: 1-D
            uint8 on the host. Called once each, in order.
        base: the base model's folder or its name on the hub, so that PEFT finds it.

    Raises:
        WeightsError: the folder has an adapter already, or cannot be written.
    """
    file = WeightFile.of(destination / ADAPTER_WEIGHTS, spec.dtype, peft_weights(spec, lora))
    make_room(destination, file.size_bytes)
    if file.path.exists():
        raise WeightsError(destination, "has an adapter already; write to another folder")
    config = adapter_config(
        lora, _modules(spec, lora), base, EXPERT_PARAMETERS if "experts" in lora.targets else (),
        among_experts=spec.experts is not None, saved=lora.saved,
    )  # fmt: skip
    write_file(destination / ADAPTER_CONFIG, config)
    file.create()
    for layer in range(spec.num_layers):
        if weights := peft_weights_of(spec, lora, layer):
            file.write(weights, read_group(adapter_group(layer)))
    for group in lora.saved_groups:
        saved = [weight for weight in saved_weights(spec, lora) if weight.group == group]
        file.write(saved, read_group(group))
    with writing(file.path, file.size_bytes):
        sync(file.path)
        sync(destination)
        sync(destination.parent)


def _modules(spec: ModelSpec, lora: Lora) -> list[str]:
    """How the names of modules with adapters end.

    Where there are experts, those of a network say whether it is a dense layer's or a shared one.
    """
    found: dict[str, None] = {}
    for target in lora.targets:
        for kind, _ in spec.layer_kinds:
            if any(target in site.adapted for site in adapter_sites(kind, lora)):
                module = peft_module(kind, target)
                in_experts = spec.experts is not None and module.startswith("mlp.")
                found[module if in_experts else module.rpartition(".")[2]] = None
    return [*found]


def adapter_config(
    lora: LowRank, modules: Iterable[str], base: str | None, parameters: Sequence[str] = (), *,
    among_experts: bool, saved: Sequence[str] = (),
) -> bytes:  # fmt: skip
    """adapter_config.json of a LoRA beside modules whose names end so.

    Args:
        parameters: those that have a matrix for each expert.
        among_experts: whether the model has routed experts, whose names others have, too.
    """
    misread = {m for m in modules if among_experts and m.rpartition(".")[2] in _OF_EXPERTS}
    named = [*parameters, *sorted(f"{module}.weight" for module in misread)]
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": [*saved] or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": [module for module in modules if module not in misread],
        **({"target_parameters": named} if named else {}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.rslora,
    }
    return json.dumps(config, indent=2).encode() + b"\n"
