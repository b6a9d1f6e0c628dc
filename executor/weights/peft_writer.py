"""Flat adapters to a folder that PEFT loads."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from twinstream.executor.weights.durable_files import make_room, sync, write_file, writing
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.peft_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from twinstream.executor.weights.weight_file import WeightFile
from twinstream.models.adapters.adapter_layout import adapter_group, adapter_sites
from twinstream.models.adapters.lora import Lora
from twinstream.models.adapters.peft_weights import (
    EXPERT_PARAMETERS,
    PEFT_MODULES,
    peft_weights,
    peft_weights_of,
)
from twinstream.models.spec import ModelSpec


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
        read_group: gives the flat adapters of `lora.LAYER`: 1-D uint8 on the host. Called once
            each, in order.
        base: the base model's folder or its name on the hub, so that PEFT finds it.

    Raises:
        WeightsError: the folder has an adapter already, or cannot be written.
    """
    file = WeightFile.of(destination / ADAPTER_WEIGHTS, spec.dtype, peft_weights(spec, lora))
    make_room(destination, file.size_bytes)
    if file.path.exists():
        raise WeightsError(destination, "has an adapter already; write to another folder")
    # PEFT takes the names of matrices that the model has not for those of its experts
    there = {
        t for kind, _ in spec.layer_kinds for s in adapter_sites(kind, lora) for t in s.adapted
    }
    targets = [PEFT_MODULES[t].split(".")[1] for t in lora.targets if t in there]
    parameters = EXPERT_PARAMETERS if "experts" in lora.targets else ()
    config = adapter_config(lora.rank, lora.alpha, targets, base, parameters)
    write_file(destination / ADAPTER_CONFIG, config)
    file.create()
    for layer in range(spec.num_layers):
        if weights := peft_weights_of(spec, lora, layer):
            file.write(weights, read_group(adapter_group(layer)))
    with writing(file.path, file.size_bytes):
        sync(file.path)
        sync(destination)
        sync(destination.parent)


def adapter_config(
    rank: int, alpha: float, targets: Sequence[str], base: str | None,
    parameters: Sequence[str] = (),
) -> bytes:  # fmt: skip
    """adapter_config.json of a plain LoRA beside modules of these names, or ends of names, and
    beside parameters that have a matrix for each expert."""
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": [*targets],
        **({"target_parameters": [*parameters]} if parameters else {}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return json.dumps(config, indent=2).encode() + b"\n"
