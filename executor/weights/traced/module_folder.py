"""A traced module's weights as transformers has them in a folder, both ways."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.modules.building import build_module, drop_codes, parameter_slots, placed
from twinstream.executor.modules.module_weights import flat_groups
from twinstream.executor.weights.codes.coded_tensor import CodedTensor
from twinstream.executor.weights.durable_files import make_room, sync, write_files, writing
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.hf_files import has_weights
from twinstream.executor.weights.hf_folder import (
    has_dtype,
    read_weights,
    stored_problems,
    stored_tensors,
)
from twinstream.executor.weights.hf_writer import by_size, write_weights
from twinstream.executor.weights.model_files import CONFIG, model_config, tokenizer_files
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.executor.weights.traced.module_adapters import write_module_adapters
from twinstream.executor.weights.traced.module_conversion import (
    Conversion,
    lazy_tensors,
    require_values,
)
from twinstream.models.hf_weights import HfWeight
from twinstream.models.layout import ADAPTERS
from twinstream.models.traced import TracedModel
from twinstream.models.traced_parts import (
    STATE,
)


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
    folder: Path, model: TracedModel
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """The groups of a folder, one after the other.

    Where files have a module's tensors as they are, each is read into its place; where transformers
    makes them of others (experts that are stored one by one), it makes those of a group: no more
    than that is held. A model by a folder's own code or with buffers that change is made whole,
    and is there beside the state for a while. Adapters are not among them.

    Raises:
        WeightsError: a file is missing or broken, or they are not the module's.
    """
    stored = stored_as_they_are(folder, model)
    if stored is None:
        if (conversion := _conversion(model)) is not None:
            yield from conversion.read(folder, stored_tensors(folder))
            return
        trusts = model.source.kind == "remote"
        module = loaded_module(folder, model.dtype, f"'{model.name}'", trusts_code=trusts)
        yield from flat_groups(model, dict(module.named_parameters()))
        return
    for group in model.parameter_groups:
        if group.startswith(ADAPTERS):
            continue
        flat = torch.empty(model.group_layout(group).size_bytes, dtype=torch.uint8)
        read_weights(stored, _weights_of(model, group), model.dtype, flat)
        yield group, flat


def stored_as_they_are(folder: Path, model: TracedModel) -> Mapping[str, StoredTensor] | None:
    """The tensors of a folder's files by the names that they have in the module; None where
    transformers has to make them of others.

    Raises:
        WeightsError: a file is missing or broken; of a module that is not transformers', too, where
            they are not the module's.
    """
    own, prefix = model.source.kind == "python", ""
    if not own:
        if _converts(model):
            return None
        prefix = f"{build_module(model.source, torch.float32, None).base_model_prefix}."
    stored, found = stored_tensors(folder), dict[str, StoredTensor]()
    weights = [w for group in model.parameter_groups for w in _weights_of(model, group)]
    for weight in weights:
        names = (weight.name, f"{prefix}{weight.name}", weight.name.removeprefix(prefix))
        name = next((name for name in names if name in stored), None)
        one = None if name is None else stored[name]
        if one is not None and one.shape == weight.shape and has_dtype(weight, one):
            found[weight.name] = one
        elif not own:
            return None
    if problems := stored_problems(weights, stored) if own else []:
        raise WeightsError(folder, f"not the weights of '{model.name}': {'; '.join(problems)}")
    return found


def _weights_of(model: TracedModel, group: str) -> tuple[HfWeight, ...]:
    kept = {buffer.name: buffer for buffer in model.buffers if group.startswith(STATE)}
    return tuple(
        HfWeight(
            inner.name, kept[inner.name].shape, group, inner.offset_bytes, inner.size_bytes,
            kept[inner.name].dtype,
        )
        if inner.name in kept
        else HfWeight(inner.name, inner.shape, group, inner.offset_bytes, inner.size_bytes)
        for inner in model.group_layout(group).tensors
    )  # fmt: skip


def _converts(model: TracedModel) -> bool:
    """Whether transformers makes a model's tensors of others when it reads a folder; versions that
    do not tell are taken to."""
    if model.source.kind == "remote":
        return True
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping as told
    except ImportError:
        return True
    mapping: Callable[[str], object] = told
    return mapping(model.model_type) is not None


def _conversion(model: TracedModel) -> Conversion | None:
    """None where all has to be made at once."""
    if model.source.kind != "transformers" or any(b.is_state for b in model.buffers):
        return None
    try:
        return Conversion(
            build_module(model.source.model_copy(update={"lora": None}), torch.float32, None), model
        )
    except ImportError:
        return None


def loaded_module(folder: Path, dtype: str, what: str, *, trusts_code: bool = False) -> Any:
    """The module that transformers makes of a folder; by the folder's own code where it is
    trusted."""
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    chosen: dict[str, Any] = {"trust_remote_code": True} if trusts_code else {}
    stored = stored_tensors(folder)
    told = {"dtype": dtype, "output_loading_info": True}
    try:
        if any(isinstance(one, CodedTensor) for one in stored.values()):
            module, about = _loaded_from_codes(folder, stored, told, chosen)
        else:
            module, about = load(
                folder, use_safetensors=True, local_files_only=True, **told, **chosen
            )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(folder, f"transformers cannot load it: {reason}") from None
    for name, made in module.named_parameters():
        for stored_name in (name, name.removeprefix(f"{module.base_model_prefix}.")):
            if stored_name in stored:
                require_values(stored_name, stored[stored_name], made)
    for kind in ("missing_keys", "mismatched_keys"):
        if about.get(kind):
            names = sorted(map(str, about[kind]))
            raise WeightsError(
                folder,
                f"its weights are not those of {what}: {some_of(names)} "
                f"{'missing' if kind == 'missing_keys' else 'of another shape'}",
            )
    return module


def _loaded_from_codes(
    folder: Path, stored: Mapping[str, StoredTensor], told: dict[str, Any], chosen: dict[str, Any]
) -> tuple[Any, Any]:
    """The same of a folder with codes, whose values are given as if it had these."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, **chosen)
    drop_codes(config)
    if told["dtype"] == "auto":
        told = told | {"dtype": config.dtype or torch.float32}
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        kind: Any = type(build(config, **chosen))
    dtype = getattr(torch, str(told["dtype"]).removeprefix("torch."))
    values = lazy_tensors(stored, dtype)
    found: tuple[Any, Any] = kind.from_pretrained(None, config=config, state_dict=values, **told)
    return found


def write_module_folder(
    destination: Path, outline: ModuleOutline, read_group: Callable[[str], torch.Tensor]
) -> None:
    """Write weights, config and tokenizer as a folder that transformers loads unedited.

    Of a model with adapters these alone, as PEFT has them. Everything is on the disk when this
    returns. A group is held at a time, and what transformers stores as other tensors than the
    module has twice; adapters, and models by a folder's own code or with buffers, whole.

    Args:
        read_group: gives the flat parameters of a group, 1-D uint8 on the host.

    Raises:
        WeightsError: the folder has weights already or cannot be written.
    """
    model = outline.model
    with writing(destination, 0):
        if model.source.lora is not None:
            groups = [group for group in model.parameter_groups if group.startswith(ADAPTERS)]
            parameters = _parameters(model, groups, read_group)
            write_module_adapters(destination, model, parameters, outline.base)
        elif model.source.kind == "python":
            weights = [w for group in model.parameter_groups for w in _weights_of(model, group)]
            write_weights(destination, model.dtype, by_size(weights), read_group)
        else:
            _write_pretrained(destination, model, read_group)
        write_files(destination, outline.files)
        for path in destination.iterdir():
            sync(path)
        sync(destination)
        sync(destination.parent)


def _parameters(
    model: TracedModel, groups: Sequence[str], read_group: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    dtype, found = getattr(torch, model.dtype), dict[str, torch.Tensor]()
    for group in groups:
        flat = read_group(group)
        for inner in model.group_layout(group).tensors:
            view = flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes].view(dtype)
            found[inner.name] = view.view(inner.shape)
    return found


def _write_pretrained(
    destination: Path, model: TracedModel, read_group: Callable[[str], torch.Tensor]
) -> None:
    """Weights and configuration of a module of transformers: by itself where it stores other
    tensors than the module has, or buffers."""
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    module: Any = build_module(model.source, getattr(torch, model.dtype), model.attention)
    buffers = {name for name, _ in module.named_buffers()} & set(module.state_dict())
    groups = model.parameter_groups
    converts = _converts(model)
    conversion = _conversion(model) if converts else None
    if buffers or (converts and conversion is None):
        if has_weights(destination):
            raise WeightsError(destination, "has weights already; write to another folder")
        parameters = _parameters(model, groups, read_group)
        make_room(destination, sum(model.group_layout(group).size_bytes for group in groups))
        given: dict[str, torch.Tensor] = {
            name: torch.nn.Parameter(parameters[name], requires_grad=False)
            for _, _, name in parameter_slots(module)
        }
        with placed(parameter_slots(module), given):
            module.save_pretrained(destination)
        if model.source.kind == "remote":  # the code goes with what it computes
            assert model.source.path is not None
            code = sorted(Path(model.source.path).glob("*.py"))
            write_files(destination, {path.name: path.read_bytes() for path in code})
        return
    if conversion is None:
        weights = [w for group in groups for w in _weights_of(model, group)]
        write_weights(destination, model.dtype, by_size(weights), read_group)
    else:
        stored = conversion.weights()
        write_weights(
            destination, model.dtype, by_size(stored),
            lambda group: conversion.stored_flat(group, read_group(group)),
        )  # fmt: skip
    module.config.architectures = [type(module).__name__]
    module.config.dtype = model.dtype
    module.config.save_pretrained(destination)
    if module.can_generate():
        module.generation_config.save_pretrained(destination)
