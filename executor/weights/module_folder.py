"""A traced module's weights as transformers has them in a folder, both ways."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.modules.adapters import fresh_adapters, is_adapter, peft_files
from twinstream.executor.modules.building import build_module, parameter_slots, placed
from twinstream.executor.modules.module_weights import flat_group, fresh_parameters
from twinstream.executor.weights.durable_files import (
    make_room,
    sync,
    whole_folder,
    write_files,
    writing,
)
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.hf_files import has_weights
from twinstream.executor.weights.model_files import CONFIG, model_config, tokenizer_files
from twinstream.executor.weights.peft_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    read_adapter_config,
    require_plain,
)
from twinstream.models.layout import ADAPTERS
from twinstream.models.traced import TracedModel


@dataclass(frozen=True)
class ModuleOutline:
    """All of a traced model's folder but the values of its weights.

    Attributes:
        files: config.json where there is one to copy, tokenizer and so on, by name.
        base: of adapters, the folder of what they stand beside.
    """

    model: TracedModel
    files: Mapping[str, bytes]
    base: str | None = None

    @classmethod
    def of(
        cls, model: TracedModel, like: Path | None = None, base: str | None = None
    ) -> "ModuleOutline":
        """
        Args:
            like: a folder whose config.json and tokenizer are taken over; of adapters the latter.
            base: of adapters, what they stand beside.

        Raises:
            WeightsError: a file of it cannot be read.
        """
        config = {}
        if like is not None and (like / CONFIG).exists() and model.source.lora is None:
            config = {CONFIG: model_config(like, model.dtype)}
        return cls(model, config | tokenizer_files(like), base)


def read_module_parameters(
    folder: Path | None, model: TracedModel, seed: int, adapters: Path | None = None
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """The groups of a folder: transformers reads its files and makes the module's tensors of them.

    For a while all of them are there beside the state.

    Args:
        folder: None are fresh parameters, drawn by the seed.
        adapters: the folder of a model's adapters; without one they are fresh.

    Raises:
        WeightsError: a file is missing or broken, or they are not the module's.
    """
    parameters = fresh_parameters(model, seed) if folder is None else _read(folder, model)
    if model.source.lora is not None:
        fresh = fresh_adapters(model, seed)
        parameters |= fresh if adapters is None else _read_adapters(adapters, model, fresh)
    for group in model.parameter_groups:
        yield group, flat_group(model, group, parameters)


def write_merged_module(source: Path, destination: Path, base: Path, dtype: str | None) -> None:
    """Write a base with a PEFT folder's adapters added, as transformers writes it.

    In float32, rounded once; all weights are held. It is there whole or not at all.

    Raises:
        WeightsError: a folder cannot be read or written, or the adapters are of another base.
    """
    config, stored = _plain_adapters(source)
    module = _loaded(base, dtype or "auto", "the adapter's base")
    parameters = dict(module.named_parameters())
    scale = float(config["lora_alpha"]) / int(config["r"])
    for layer in [name.removesuffix(_A) for name in stored if name.endswith(_A)]:
        a, b = stored[f"{layer}{_A}"].float(), stored[f"{layer}{_B}"].float()
        weight = parameters.get(f"{layer}.weight")
        added = scale * (b @ a)
        if weight is not None and type(module.get_submodule(layer)).__name__ == "Conv1D":
            added = added.T
        if weight is None or weight.shape != added.shape:
            raise WeightsError(source, f"has adapters of {layer}, which {base} has not like that")
        weight.data.copy_(weight.float() + added)
    with whole_folder(destination) as folder, writing(folder, 0):
        module.save_pretrained(folder)
        write_files(folder, tokenizer_files(base))


def _read(folder: Path, model: TracedModel) -> dict[str, torch.Tensor]:
    if model.source.kind == "python":
        return _read_own(folder, model)
    return dict(_loaded(folder, model.dtype, f"'{model.name}'").named_parameters())


def _loaded(folder: Path, dtype: str, what: str) -> Any:
    """The module that transformers makes of a folder."""
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    chosen: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    try:
        module, about = load(folder, output_loading_info=True, local_files_only=True, **chosen)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(folder, f"transformers cannot load it: {reason}") from None
    for kind in ("missing_keys", "mismatched_keys"):
        if about.get(kind):
            names = sorted(map(str, about[kind]))
            raise WeightsError(
                folder,
                f"its weights are not those of {what}: {some_of(names)} "
                f"{'missing' if kind == 'missing_keys' else 'of another shape'}",
            )
    return module


def _read_adapters(
    folder: Path, model: TracedModel, like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    (config, found), lora = _plain_adapters(folder), model.source.lora
    assert lora is not None, "the model has adapters"
    if (config.get("r"), config.get("lora_alpha")) != (lora.rank, lora.alpha):
        raise WeightsError(
            folder, f"has r = {config.get('r')}, alpha = {config.get('lora_alpha')}, and --lora "
            f"says r = {lora.rank}, alpha = {lora.alpha:g}",
        )  # fmt: skip
    path = folder / ADAPTER_WEIGHTS
    if more := sorted(set(found) - set(like)):
        raise WeightsError(path, f"has {some_of(more)} besides what --lora says")
    wrong = [
        name for name, one in like.items() if getattr(found.get(name), "shape", 0) != one.shape
    ]
    if wrong:
        raise WeightsError(path, f"lacks {some_of(wrong)}, or has another shape of it")
    return {name: found[name].to(one.dtype) for name, one in like.items()}


def _plain_adapters(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and matrices of plain LoRA, by the names of the module's own parameters.

    Raises:
        WeightsError: it is another kind of adapter, or not whole.
    """
    config, path = read_adapter_config(folder), folder / ADAPTER_WEIGHTS
    known = {key: value for key, value in config.items() if key != "fan_in_fan_out"}
    require_plain(folder / ADAPTER_CONFIG, known)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise WeightsError(folder / ADAPTER_CONFIG, f"has r = {rank!r}, lora_alpha = {alpha!r}")
    found = {name.removeprefix(_PEFT): one for name, one in _tensors_of(path).items()}
    layers = {name.removesuffix(ending) for name in found for ending in (_A, _B)}
    layers &= {name.rpartition(".lora_")[0] for name in found}
    whole = {f"{layer}{ending}" for layer in layers for ending in (_A, _B)}
    if wrong := sorted(whole ^ set(found)):
        raise WeightsError(path, f"is not lora_A and lora_B beside layers: {some_of(wrong)}")
    return config, found


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(path, f"cannot be read: {error}") from None


def _read_own(folder: Path, model: TracedModel) -> dict[str, torch.Tensor]:
    """What `write_module_folder` wrote of a module that is not transformers'."""
    path = folder / _OWN
    found = _tensors_of(path)
    tensors = [tensor for group in model.groups for tensor in group.tensors]
    names = [one.name for one in tensors if not (model.source.lora and is_adapter(one.name))]
    if missing := [name for name in names if name not in found]:
        raise WeightsError(path, f"lacks {some_of(missing)}")
    return found


_OWN = "model.safetensors"
_PEFT, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def write_module_folder(
    destination: Path, outline: ModuleOutline, read_group: Callable[[str], torch.Tensor]
) -> None:
    """Write weights, config and tokenizer as a folder that transformers loads unedited.

    Of a model with adapters these alone, as PEFT has them. Everything is on the disk when this
    returns. All that is written is held at once.

    Args:
        read_group: gives the flat parameters of a group, 1-D uint8 on the host.

    Raises:
        WeightsError: the folder has weights already or cannot be written.
    """
    model = outline.model
    groups = [g for g in model.parameter_groups if not model.source.lora or g.startswith(ADAPTERS)]
    size_bytes = sum(model.group_layout(group).size_bytes for group in groups)
    make_room(destination, size_bytes)
    if has_weights(destination):
        raise WeightsError(destination, "has weights already; write to another folder")
    dtype = getattr(torch, model.dtype)
    parameters: dict[str, torch.Tensor] = {}
    for group in groups:
        flat = read_group(group)
        for inner in model.group_layout(group).tensors:
            view = flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes].view(dtype)
            parameters[inner.name] = view.view(inner.shape)
    with writing(destination, size_bytes):
        from safetensors.torch import save_file

        if model.source.lora is not None:
            tensors, config = peft_files(model, parameters, outline.base)
            save_file(tensors, destination / ADAPTER_WEIGHTS)
            write_files(destination, {ADAPTER_CONFIG: json.dumps(config, indent=2).encode()})
        elif model.source.kind == "python":
            save_file({name: one.contiguous() for name, one in parameters.items()},
                      destination / _OWN)  # fmt: skip
        else:
            _save_pretrained(destination, model, parameters)
        write_files(destination, outline.files)
        for path in destination.iterdir():
            sync(path)
        sync(destination)
        sync(destination.parent)


def _save_pretrained(
    destination: Path, model: TracedModel, parameters: Mapping[str, torch.Tensor]
) -> None:
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    module: Any = build_module(model.source, getattr(torch, model.dtype), model.attention)
    slots = parameter_slots(module)
    given: dict[str, torch.Tensor] = {
        name: torch.nn.Parameter(parameters[name], requires_grad=False) for _, _, name in slots
    }
    with placed(slots, given):
        module.save_pretrained(destination)
