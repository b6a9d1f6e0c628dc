"""A folder with a PEFT adapter, checked by its headers and read into flat tensors."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.hf_folder import read_weights, stored_problems
from twinstream.executor.weights.safetensors_header import (
    ITEMSIZE_BYTES,
    StoredTensor,
    read_header,
)
from twinstream.models.adapters.lora import Lora, LoraError, lora_of
from twinstream.models.adapters.peft_weights import (
    EXPERT_MODULES,
    EXPERT_PARAMETERS,
    PEFT_MODULES,
    peft_weights,
    peft_weights_of,
)
from twinstream.models.layout import layer_of
from twinstream.models.spec import ModelSpec
from twinstream.schedule.files import read_text, reason_of

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "twinstream_base.json"  # in how many bits the base was kept that they were trained beside
_PREFIX = "base_model.model."
_EMPTY: tuple[object, ...] = (None, False, [], {}, "")
# What says nothing of what an adapter computes: names, and options of its training and loading.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "target_parameters",
    "task_type",
})  # fmt: skip
# Every other key may change the computation unless it is empty or has one of these values.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Beginnings that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_CONVERT = (
    "its base is not the one it names, but what PEFT made of it when it began; convert it with "
    "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)


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
        lora, stored = read_adapter(folder)
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
    """Read adapter_config.json.

    Raises:
        WeightsError: there is none, or it is no JSON object.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(read_text(path, "utf-8-sig"))
    except OSError as error:
        raise WeightsError(
            path, f"cannot be read: {reason_of(error)}; give a PEFT folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(path, f"is not valid JSON ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise WeightsError(path, "is not a JSON object; fetch it again")
    return config


def base_of(folder: Path) -> str | None:
    """The base model that an adapter says it belongs to: a folder, or a name on the hub."""
    base = read_adapter_config(folder).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def read_adapter(folder: Path) -> tuple[Lora, dict[str, StoredTensor]]:
    """The options and the tensors of a plain LoRA of decoder blocks, whatever its base is.

    Raises:
        WeightsError: a file is missing or broken, it is no plain LoRA, or its tensors are not
            those that adapter_config.json says.
    """
    config, path = read_adapter_config(folder), folder / ADAPTER_CONFIG
    require_plain(path, config)
    stored = read_header(folder / ADAPTER_WEIGHTS)
    modules = {n.removeprefix(_PREFIX).rpartition(".lora_")[0] for n in stored if ".lora_" in n}
    of_experts = {m for m in modules if m.endswith(tuple(EXPERT_MODULES.values()))}
    targets = [t for t, name in PEFT_MODULES.items()
               if any(m.endswith(_ends(name)) for m in modules)]  # fmt: skip
    targets += ["experts"] if of_experts else []
    if not targets:
        raise WeightsError(folder / ADAPTER_WEIGHTS, "has no LoRA matrices of a decoder's blocks")
    _require_targeted(path, config, modules - of_experts)
    if of_experts and set(config.get("target_parameters") or ()) != set(EXPERT_PARAMETERS):
        raise WeightsError(
            path, f"has target_parameters = {config.get('target_parameters')!r:.80}, and "
            f"{ADAPTER_WEIGHTS} adapters of experts: they are {', '.join(EXPERT_PARAMETERS)}",
        )  # fmt: skip
    rank, alpha = config.get("r"), config.get("lora_alpha")
    try:
        lora = lora_of(f"r={rank},alpha={alpha},targets={','.join(targets)}")
    except LoraError as error:
        raise WeightsError(path, f"has r = {rank!r}, lora_alpha = {alpha!r}: {error}") from None
    if problems := list(_problems(lora, modules, of_experts, stored)):
        raise WeightsError(
            folder / ADAPTER_WEIGHTS, f"{some_of(problems)}; {ADAPTER_CONFIG} says r = {rank}, and "
            "a LoRA is lora_A and lora_B beside a projection",
        )  # fmt: skip
    return lora, stored


def require_plain(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse what changes the computation of an adapter.

    Raises:
        WeightsError: it is no plain LoRA.
    """
    for name in ("peft_type", *config):
        value, plain = config.get(name), _PLAIN.get(name, ())
        if name in _HARMLESS or value in plain or (value in _EMPTY and name != "peft_type"):
            continue
        why = _CONVERT if name == "init_lora_weights" else (
            f"only {name} = {plain[-1] if plain else None!r} is read"
        )  # fmt: skip
        raise WeightsError(path, f"has {name} = {value!r:.80}, which is not plain LoRA: {why}")


def _require_targeted(path: Path, config: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Refuse matrices that PEFT would not load: of modules that the patterns do not take in."""
    wanted, excluded = config.get("target_modules"), config.get("exclude_modules")
    try:
        for module in sorted(modules):
            if (wanted and not _matches(wanted, module)) or _matches(excluded or [], module):
                raise WeightsError(
                    path, f"has target_modules = {wanted!r:.80} and exclude_modules = "
                    f"{excluded!r:.80}, and {ADAPTER_WEIGHTS} has {module}: PEFT would leave it out"
                )  # fmt: skip
    except (re.error, TypeError) as error:
        raise WeightsError(path, f"its target_modules cannot be read: {error}") from None


def _matches(patterns: str | Sequence[str], module: str) -> bool:
    """By PEFT's rule: a regular expression, or a list of names or their ends."""
    if isinstance(patterns, str):
        return patterns == "all-linear" or bool(re.fullmatch(patterns, module))
    return any(f".{module}".endswith(f".{pattern}") for pattern in patterns)


def _ends(module: str) -> tuple[str, ...]:
    """How the names of a target end: of an expert that all tokens go to it has another module."""
    shared = ("mlp.shared_expert.", "mlp.shared_experts.", "mlp.")
    return tuple(f".{module.replace('mlp.', each)}" for each in shared)


def _problems(
    lora: Lora, modules: Iterable[str], of_experts: Collection[str],
    stored: Mapping[str, StoredTensor],
) -> Iterator[str]:  # fmt: skip
    """Matrices that are missing, of another rank, or beside something else.

    Those of experts have a rank for each.
    """
    many = {f"{_PREFIX}{m}.lora_{which}.weight" for m in of_experts for which in "AB"}
    expected = {f"{_PREFIX}{m}.lora_{which}.weight": "AB".index(which)
                for m in sorted(modules) for which in "AB"}  # fmt: skip
    yield from (f"{name} is missing" for name in expected if name not in stored)
    for name, tensor in stored.items():
        if name not in expected:
            yield f"{name} is none of a LoRA"
        elif len(tensor.shape) != 2 or (
            tensor.shape[expected[name]] % lora.rank
            if name in many
            else tensor.shape[expected[name]] != lora.rank
        ):
            yield f"{name} is {list(tensor.shape)}"
        elif tensor.dtype not in ITEMSIZE_BYTES:
            yield f"{name} is {tensor.dtype}"
