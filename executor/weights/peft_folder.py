"""A folder with a PEFT adapter, checked by its headers and read into flat tensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_folder import read_weights, stored_problems
from twinstream.executor.weights.safetensors_header import StoredTensor, read_header
from twinstream.models.adapters.lora import TARGETS, Lora, LoraError, lora_of
from twinstream.models.adapters.peft_weights import (
    PEFT_MODULES,
    peft_weights,
    peft_weights_of,
)
from twinstream.models.spec import ModelSpec
from twinstream.models.trained import layer_of
from twinstream.schedule.files import read_text, told

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# What would change the computation, and the values that do not.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}


@dataclass(frozen=True)
class PeftFolder:
    """Adapters of every layer of `spec`; nothing but headers has been read."""

    path: Path
    spec: ModelSpec
    lora: Lora
    stored: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: str | Path, spec: ModelSpec) -> Self:
        """Check an adapter against a model, from adapter_config.json and its file's header.

        Raises:
            WeightsError: a file is missing or broken, the adapter is of another model, or it
                computes what plain LoRA on whole layers does not.
        """
        folder = Path(path)
        config = read_adapter_config(folder)
        stored = read_header(folder / ADAPTER_WEIGHTS)
        targets = [t for t in TARGETS if any(_is_of(name, PEFT_MODULES[t]) for name in stored)]
        lora = _lora(folder, config, targets)
        if problems := stored_problems(peft_weights(spec, lora), stored):
            raise WeightsError(
                folder, f"not an adapter of '{spec.name}': {'; '.join(problems)}. Is it that of "
                "another model?"
            )  # fmt: skip
        return cls(folder, spec, lora, stored)

    def read_group(self, group: str, destination: torch.Tensor) -> None:
        """Fill the flat adapters of `lora.LAYER`, converted to the model's dtype.

        Args:
            destination: 1-D uint8 on the host, of the size of the adapters' layout.

        Raises:
            WeightsError: the file has gone or changed since the folder was opened.
        """
        layer = layer_of(group)
        assert layer is not None, f"{group} is no group of adapters"
        weights = peft_weights_of(self.spec, self.lora, layer)
        read_weights(self.stored, weights, self.spec.dtype, destination)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """What adapter_config.json says.

    Raises:
        WeightsError: there is none, or it is no JSON object.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(read_text(path))
    except OSError as error:
        raise WeightsError(path, f"cannot be read: {told(error)}; give a PEFT folder") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(path, f"is not valid JSON ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise WeightsError(path, "is not a JSON object; fetch it again")
    return config


def base_of(folder: Path) -> str | None:
    """The base model that an adapter says it belongs to: a folder, or a name on the hub."""
    base = read_adapter_config(folder).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def _is_of(name: str, module: str) -> bool:
    return name.endswith((f".{module}.lora_A.weight", f".{module}.lora_B.weight"))


def _lora(folder: Path, config: Mapping[str, Any], targets: Sequence[str]) -> Lora:
    path = folder / ADAPTER_CONFIG
    for name, plain in _PLAIN.items():
        if config.get(name, "LORA" if name == "peft_type" else None) not in plain:
            raise WeightsError(
                path, f"has {name} = {config[name]!r:.80}, which is not plain LoRA: only "
                f"{name} = {plain[-1]!r} is read"
            )  # fmt: skip
    if not targets:
        raise WeightsError(folder / ADAPTER_WEIGHTS, "has no LoRA matrices of a decoder's blocks")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    try:
        return lora_of(f"r={rank},alpha={alpha},targets={','.join(targets)}")
    except LoraError as error:
        raise WeightsError(path, f"has r = {rank!r}, lora_alpha = {alpha!r}: {error}") from None
