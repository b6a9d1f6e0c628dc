"""A folder with a PEFT adapter, checked by its headers and read into flat tensors."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError

from twinstream.executor.weights.codes.coded_tensor import STORED_DTYPES
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.hf_folder import (
    read_weights,
    stored_problems,
)
from twinstream.executor.weights.peft.peft_experts import joined_experts, of_each_expert
from twinstream.executor.weights.safetensors_header import (
    ITEMSIZE_BYTES,
    StoredTensor,
    read_header,
)
from twinstream.executor.weights.weight_file import fill_from_stored
from twinstream.models.decoders.hf_weights import HfWeight
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import layer_of
from twinstream.models.recipes.lora import Lora, LowRank, Saved
from twinstream.models.recipes.peft_weights import (
    EXPERT_MODULES,
    EXPERT_PARAMETERS,
    PEFT_MODULES,
    peft_weights,
    peft_weights_of,
    saved_weights,
)
from twinstream.schedule.files import read_text, reason_of

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "twinstream_base.json"  # in how many bits the base was kept that they were trained beside
_PREFIX = "base_model.model."
_SAVED = "modules_to_save"
_WHOLE: Mapping[Saved, str] = {
    "embed_tokens": f"{_PREFIX}model.embed_tokens.weight", "lm_head": f"{_PREFIX}lm_head.weight",
}  # fmt: skip
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
    "use_rslora": (True,),
    # Beginnings that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_CONVERT = (
    "its base is not the one it names, but what PEFT made of it when it began; convert it with "
    "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)


@dataclass(frozen=True)
class PeftFolder:
    """Adapters of every layer of `spec`; nothing but headers has been read.

    `joined` are all its tensors where they had to be read, since those of each expert are made
    those of all.
    """

    path: Path
    spec: ModelSpec
    lora: Lora
    stored: Mapping[str, StoredTensor]
    joined: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, spec: ModelSpec) -> Self:
        """Check an adapter against a model, from adapter_config.json and its file's header.

        Raises:
            WeightsError: a file is missing or broken, the adapter is of another model, or it
                computes what plain LoRA on whole layers does not.
        """
        folder = Path(path)
        lora, stored, joined = read_adapter(folder)
        _require_known(folder, stored)
        if lora.saved and spec.tied_embeddings:
            raise WeightsError(
                folder / ADAPTER_CONFIG, f"has {_SAVED} = {[*lora.saved]}, and '{spec.name}' has "
                "one matrix for both, of which PEFT saved a copy: merge it with PEFT"
            )  # fmt: skip
        if problems := stored_problems(peft_weights(spec, lora), stored):
            raise WeightsError(
                folder, f"not an adapter of '{spec.name}': {'; '.join(problems)}. Is it that of "
                "another model?"
            )  # fmt: skip
        return cls(folder, spec, lora, stored, joined)

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
        self._read(weights, destination)

    def put_saved(self, group: str, flat: torch.Tensor) -> None:
        """Put what was trained whole into a group of the base's parameters, in place.

        Raises:
            WeightsError: the file has gone or changed since the folder was opened.
        """
        for weight in saved_weights(self.spec, self.lora):
            if weight.group == group:
                inside = flat[weight.offset_bytes : weight.end_bytes]
                at_start = replace(weight, offset_bytes=0)
                self._read([at_start], inside)

    def _read(self, weights: Sequence[HfWeight], destination: torch.Tensor) -> None:
        if not self.joined:
            read_weights(self.stored, weights, self.spec.dtype, destination)
            return
        destination.zero_()
        dtype = getattr(torch, self.spec.dtype)
        for weight in weights:
            values = self.joined[weight.name].to(dtype).view(torch.uint8).flatten()
            if weight.axes:
                fill_from_stored(weight, values, destination)
            else:
                destination[weight.offset_bytes : weight.end_bytes].copy_(values)


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


def read_adapter(
    folder: Path,
) -> tuple[Lora, dict[str, StoredTensor], dict[str, torch.Tensor]]:
    """The options and the tensors of a plain LoRA of decoder blocks, whatever its base is.

    The last are those that had to be read: all, where each expert has its own.

    Raises:
        WeightsError: a file is missing or broken, it is no plain LoRA, or its tensors are not
            those that adapter_config.json says.
    """
    config, path = read_adapter_config(folder), folder / ADAPTER_CONFIG
    require_plain(path, {name: value for name, value in config.items() if name != _SAVED})
    saved = _saved_of(path, config)
    low_rank = low_rank_of(path, config)
    stored = read_header(folder / ADAPTER_WEIGHTS)
    joined: dict[str, torch.Tensor] = {}
    if of_each_expert(stored):
        config, joined = joined_experts(folder / ADAPTER_WEIGHTS, config, tensors_of(folder))
        low_rank = low_rank_of(path, config)
        stored = {name: _header_of(folder / ADAPTER_WEIGHTS, tensor)
                  for name, tensor in joined.items()}  # fmt: skip
    modules = {n.removeprefix(_PREFIX).rpartition(".lora_")[0] for n in stored if ".lora_" in n}
    of_experts = {m for m in modules if m.endswith(tuple(EXPERT_MODULES.values()))}
    targets = [t for t, name in PEFT_MODULES.items()
               if any(m.endswith(_ends(name)) for m in modules)]  # fmt: skip
    targets += ["experts"] if of_experts else []
    if not targets:
        raise WeightsError(folder / ADAPTER_WEIGHTS, "has no LoRA matrices of a decoder's blocks")
    _require_targeted(path, config, modules - of_experts)
    if of_experts and (missing := [p for p in EXPERT_PARAMETERS if not _takes_in(config, p)]):
        raise WeightsError(
            path, f"has target_parameters = {config.get('target_parameters')!r:.80}, and "
            f"{ADAPTER_WEIGHTS} adapters of experts, which are read beside both of "
            f"{' and '.join(EXPERT_PARAMETERS)}: {missing[0]} is none of them",
        )  # fmt: skip
    lora = Lora.model_validate({**dict(low_rank), "targets": targets, "saved": saved})
    of_lora = {
        name: tensor
        for name, tensor in stored.items()
        if name not in {_WHOLE[name] for name in saved}
    }
    if problems := list(_problems(lora, modules, of_experts, of_lora)):
        raise WeightsError(
            folder / ADAPTER_WEIGHTS, f"{some_of(problems)}; {ADAPTER_CONFIG} says r = "
            f"{config['r']}, and a LoRA is lora_A and lora_B beside a projection",
        )  # fmt: skip
    return lora, stored, joined


def _saved_of(path: Path, config: Mapping[str, Any]) -> tuple[Saved, ...]:
    """What was trained whole beside the adapters."""
    names = config.get(_SAVED) or []
    ends = {str(name).rpartition(".")[2] for name in names} if isinstance(names, list) else {"?"}
    if others := sorted(ends - set(_WHOLE)):
        raise WeightsError(
            path, f"has {_SAVED} = {names!r:.80}: beside adapters {' and '.join(_WHOLE)} can be "
            f"trained whole, and not {others[0]}"
        )  # fmt: skip
    return tuple(name for name in _WHOLE if name in ends)


def low_rank_of(path: Path, config: Mapping[str, Any]) -> LowRank:
    """Rank and scale that adapter_config.json says.

    Raises:
        WeightsError: they cannot be used.
    """
    rank, alpha, rslora = (config.get(name) for name in ("r", "lora_alpha", "use_rslora"))
    try:
        return LowRank.model_validate({"rank": rank, "alpha": alpha, "rslora": bool(rslora)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise WeightsError(
            path, f"has r = {rank!r}, lora_alpha = {alpha!r}: {first['loc'][0]}: {first['msg']}"
        ) from None


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an adapter, as they are.

    Raises:
        WeightsError: they cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(path, f"cannot be read: {error}") from None


def _header_of(path: Path, tensor: torch.Tensor) -> StoredTensor:
    dtypes = {dtype: name for name, dtype in STORED_DTYPES.items()}
    name = dtypes.get(tensor.dtype, str(tensor.dtype))
    return StoredTensor(path, name, tuple(tensor.shape), 0, tensor.nbytes)


def _require_known(folder: Path, stored: Iterable[str]) -> None:
    """Refuse matrices beside what gets no adapters here, by what they are."""
    known = (*EXPERT_MODULES.values(), *(e for name in PEFT_MODULES.values() for e in _ends(name)))
    beside = sorted({name.rpartition(".lora_")[0] for name in stored if ".lora_" in name})
    if others := [name for name in beside if not name.endswith(known)]:
        raise WeightsError(
            folder / ADAPTER_WEIGHTS, f"has adapters of {some_of(others)}: those of the linear "
            "layers of attention and of the feed-forward network, and of routed experts, are read",
        )  # fmt: skip


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
            if _takes_in(config, f"{module}.weight"):
                continue
            if (wanted and not _matches(wanted, module)) or _matches(excluded or [], module):
                raise WeightsError(
                    path, f"has target_modules = {wanted!r:.80} and exclude_modules = "
                    f"{excluded!r:.80}, and {ADAPTER_WEIGHTS} has {module}: PEFT would leave it out"
                )  # fmt: skip
    except (re.error, TypeError) as error:
        raise WeightsError(path, f"its target_modules cannot be read: {error}") from None


def _takes_in(config: Mapping[str, Any], parameter: str) -> bool:
    """Whether target_parameters name a parameter: whole, or by the end of its name."""
    named = config.get("target_parameters") or ()
    return isinstance(named, list) and _matches([str(name) for name in named], parameter)


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
