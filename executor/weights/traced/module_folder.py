"""A traced module's weights as transformers has them in a folder, both ways."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.modules.building import (
    buffer_slots,
    build_module,
    drop_codes,
    is_text_part,
    parameter_slots,
    placed,
)
from twinstream.executor.weights.carried_tensors.carried import CarriedTensors, read_tensor
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
from twinstream.executor.weights.model_files import (
    CONFIG,
    files_beside,
    model_config,
    tokenizer_files,
)
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.executor.weights.traced.module_adapters import renamed, write_module_adapters
from twinstream.executor.weights.traced.module_conversion import lazy_tensors, require_values
from twinstream.executor.weights.traced.module_names import (
    ModuleNames,
    layers_in_whole,
    stored_buffers,
)
from twinstream.executor.weights.traced.module_weights import flat_group, flat_groups
from twinstream.executor.weights.traced.stored_groups import StoredGroups
from twinstream.models.decoders.hf_weights import HfWeight
from twinstream.models.layout import ADAPTERS
from twinstream.models.providers.traced import TracedModel
from twinstream.models.providers.traced_parts import (
    STATE,
)

Buffers = Mapping[str, torch.Tensor]
"""Of a module, by their names there."""


@dataclass(frozen=True)
class ModuleOutline:
    """All of a traced model's folder but the values of its weights.

    Attributes:
        files: config.json where there is one to copy, tokenizer and so on, by name.
        base: of adapters, the folder of what they stand beside.
        names: what tensors are called in the folder that is taken over; None where none is.
        carried: what is written as it is in the folder that is taken over, or as the module begins.
    """

    model: TracedModel
    files: Mapping[str, bytes]
    base: str | None = None
    names: ModuleNames | None = None
    carried: CarriedTensors = field(default_factory=CarriedTensors)

    @classmethod
    def of(
        cls, model: TracedModel, like: Path | None = None, base: str | None = None
    ) -> "ModuleOutline":
        """
        Args:
            like: a folder whose config.json, tokenizer, and names and other tensors of weights are
                taken over; of adapters the tokenizer alone.
            base: of adapters, what they stand beside.

        Raises:
            WeightsError: a file of it cannot be read, or has tensors that are not the model's.
        """
        if model.source.lora is not None:
            return cls(model, tokenizer_files(like), base)
        files = files_beside(like)
        if like is None or not has_weights(like):
            is_part = is_text_part(model.source)
            if like is not None and (like / CONFIG).exists() and not is_part:
                files = {CONFIG: model_config(like, model.dtype)} | files
            names = ModuleNames.as_transformers_writes(model)
            return cls(model, files, base, None, names.carried_of(model, {}))
        if (like / CONFIG).exists():
            files = {CONFIG: model_config(like, model.dtype)} | files
        stored = stored_tensors(like)
        names = ModuleNames.of(model, like, stored)
        return cls(model, files, base, names, names.carried_of(model, stored))

    def write(self, destination: Path, read_group: Callable[[str], torch.Tensor]) -> None:
        """Write weights, config and tokenizer as a folder that transformers loads unedited.

        Of a model with adapters these alone, as PEFT has them. Everything is on the disk when this
        returns. A group is held at a time, and what transformers stores as other tensors than the
        module has twice; adapters, and models by a folder's own code or with buffers, whole.

        Args:
            read_group: gives the flat parameters of a group, 1-D uint8 on the host.

        Raises:
            WeightsError: the folder has weights already or cannot be written.
        """
        model = self.model
        with writing(destination, 0):
            if model.source.lora is not None:
                groups = [group for group in model.parameter_groups if group.startswith(ADAPTERS)]
                found, layers = _parameters(model, groups, read_group), layers_in_whole(model)
                parameters = {renamed(name, layers): tensor for name, tensor in found.items()}
                write_module_adapters(destination, model, parameters, self.base)
            elif model.source.kind == "python":
                weights = [w for group in model.parameter_groups for w in _weights_of(model, group)]
                _write_divided(destination, self, weights, read_group)
            else:
                _write_pretrained(destination, self, read_group)
            write_files(destination, self.files)
            for path in destination.iterdir():
                sync(path)
            sync(destination)
            sync(destination.parent)


def read_module_parameters(
    folder: Path, model: TracedModel
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """The groups of a folder, one after the other.

    Where files have a module's tensors as they are, each is read into its place; where transformers
    makes them of others (experts that are stored one by one), it makes those of a group: no more
    than that is held. A model by a folder's own code that has others, or with buffers that change,
    is made whole, and is there beside the state for a while. Adapters are not among them.

    Raises:
        WeightsError: a file is missing or broken, or they are not the module's.
    """
    stored, groups = stored_tensors(folder), _base_groups(model)
    if model.source.kind == "python":
        for group in groups:
            yield group, _read_flat(stored_of_python(folder, model, stored), model, group)
        return
    names = ModuleNames.of(model, folder, stored)
    dtype: torch.dtype = getattr(torch, model.dtype)
    if (there := stored_as_they_are(model, names, stored)) is not None:
        for group in groups:
            yield group, _read_flat(there, model, group)
    elif names.conversion is None or any(buffer.is_state for buffer in model.buffers):
        trusts = model.source.kind == "remote"
        module = loaded_module(folder, model.dtype, f"'{model.name}'", trusts_code=trusts)
        yield from flat_groups(model, dict(module.named_parameters()))
    else:
        for group in groups:
            wanted = [inner.name for inner in model.group_layout(group).tensors]
            files = [one for name in wanted for one in names.converted.get(name, ())]
            files += [names.plain[name] for name in wanted if name in names.plain]
            inside = {name: stored[name] for name in files}
            made = names.conversion.read(folder, wanted, inside, dtype)
            yield group, flat_group(model, group, made)


def read_module_buffers(folder: Path, model: TracedModel) -> Buffers:
    """The buffers that a folder has and no step changes, by the module's names.

    Raises:
        WeightsError: a file is missing or broken, or one is of another shape.
    """
    first = stored_buffers(model)
    if not first or model.source.kind == "python":
        return {}
    stored = stored_tensors(folder)
    names, found = ModuleNames.of(model, folder, stored), dict[str, torch.Tensor]()
    for name in (name for name in first if name in names.plain):
        one = stored[names.plain[name]]
        if one.shape != tuple(first[name].shape):
            raise WeightsError(
                one.file,
                f"has {names.plain[name]} of shape {list(one.shape)}, not "
                f"{list(first[name].shape)} as the model of config.json",
            )
        found[name] = read_tensor(one, names.plain[name]).to(first[name].dtype)
    return found


def _base_groups(model: TracedModel) -> list[str]:
    return [group for group in model.parameter_groups if not group.startswith(ADAPTERS)]


def _read_flat(stored: Mapping[str, StoredTensor], model: TracedModel, group: str) -> torch.Tensor:
    flat = torch.empty(model.group_layout(group).size_bytes, dtype=torch.uint8)
    read_weights(stored, _weights_of(model, group), model.dtype, flat)
    return flat


def stored_as_they_are(
    model: TracedModel, names: ModuleNames, stored: Mapping[str, StoredTensor]
) -> Mapping[str, StoredTensor] | None:
    """The tensors of files by the names that they have in the module; None where transformers has
    to make them of others."""
    found = dict[str, StoredTensor]()
    for weight in (w for group in _base_groups(model) for w in _weights_of(model, group)):
        name = names.plain.get(weight.name)
        if name is None or weight.name in names.converted:
            return None
        one = stored[name]
        if one.shape != weight.shape or not has_dtype(weight, one):
            return None
        found[weight.name] = one
    return found


def stored_of_python(
    folder: Path, model: TracedModel, stored: Mapping[str, StoredTensor]
) -> Mapping[str, StoredTensor]:
    """The tensors of a module of a person's own file.

    Raises:
        WeightsError: they are not the module's.
    """
    weights = [w for group in _base_groups(model) for w in _weights_of(model, group)]
    if problems := stored_problems(weights, stored, stored_buffers(model)):
        raise WeightsError(folder, f"not the weights of '{model.name}': {'; '.join(problems)}")
    return stored


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


def loaded_module(
    folder: Path, dtype: str, what: str, *, trusts_code: bool = False, kind: Any = None
) -> Any:
    """The module that transformers makes of a folder, of a class of it or as a causal decoder; by
    the folder's own code where it is trusted."""
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    load: Any = (kind or transformers.AutoModelForCausalLM).from_pretrained
    chosen: dict[str, Any] = {"trust_remote_code": True} if trusts_code else {}
    stored = stored_tensors(folder)
    told = {"dtype": dtype, "output_loading_info": True}
    try:
        if any(isinstance(one, CodedTensor) for one in stored.values()):
            module, about = _loaded_from_codes(folder, stored, told, chosen, kind)
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
    for wrong in ("missing_keys", "mismatched_keys"):
        if about.get(wrong):
            names = sorted(map(str, about[wrong]))
            raise WeightsError(
                folder,
                f"its weights are not those of {what}: {some_of(names)} "
                f"{'missing' if wrong == 'missing_keys' else 'of another shape'}",
            )
    return module


def _loaded_from_codes(
    folder: Path, stored: Mapping[str, StoredTensor], told: dict[str, Any],
    chosen: dict[str, Any], kind: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The same of a folder with codes, whose values are given as if it had these."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, **chosen)
    drop_codes(config)
    if told["dtype"] == "auto":
        told = told | {"dtype": config.dtype or torch.float32}
    if kind is None:
        build: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            kind = type(build(config, **chosen))
    dtype = getattr(torch, str(told["dtype"]).removeprefix("torch."))
    values = lazy_tensors(stored, dtype)
    found: tuple[Any, Any] = kind.from_pretrained(None, config=config, state_dict=values, **told)
    return found


def _write_divided(
    destination: Path, outline: ModuleOutline, weights: Sequence[HfWeight],
    read_group: Callable[[str], torch.Tensor],
) -> None:  # fmt: skip
    """Weights, and what is carried beside them."""
    division = by_size([*weights, *outline.carried.weights()])
    read = outline.carried.beside(read_group)
    write_weights(destination, outline.model.dtype, division, read)


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
    destination: Path, outline: ModuleOutline, read_group: Callable[[str], torch.Tensor]
) -> None:
    """Weights and configuration of a module of transformers: by itself where its code is other
    people's and stores other tensors than the module has, or a step changes its buffers."""
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    model = outline.model
    module: Any = build_module(model.source, getattr(torch, model.dtype), model.attention)
    stored = StoredGroups(model, outline.names or ModuleNames.as_transformers_writes(model))
    if any(buffer.is_state for buffer in model.buffers) or not stored.is_known:
        _save_whole(destination, outline, module, read_group)
    else:
        _write_divided(
            destination, outline, stored.weights(),
            lambda group: stored.flat(group, read_group(group)),
        )  # fmt: skip
        module.config.architectures = [type(module).__name__]
        module.config.dtype = model.dtype
        module.config.save_pretrained(destination)
        if module.can_generate():
            module.generation_config.save_pretrained(destination)


def _save_whole(
    destination: Path, outline: ModuleOutline, module: Any,
    read_group: Callable[[str], torch.Tensor],
) -> None:  # fmt: skip
    """As the module saves itself, with all its parameters and the buffers that the folder had."""
    model, groups = outline.model, outline.model.parameter_groups
    if has_weights(destination):
        raise WeightsError(destination, "has weights already; write to another folder")
    if other := sorted(outline.names.carried if outline.names else ()):
        raise WeightsError(
            Path(outline.base or model.name),
            f"has tensors that its code does not save: {some_of(other)}",
        )
    parameters = _parameters(model, groups, read_group)
    make_room(destination, sum(model.group_layout(group).size_bytes for group in groups))
    given: dict[str, torch.Tensor] = {
        name: torch.nn.Parameter(parameters[name], requires_grad=False)
        for _, _, name in parameter_slots(module)
    }
    names = outline.names.plain if outline.names else {}
    buffers = [
        slot for slot in buffer_slots(module) if names.get(slot[2]) in outline.carried.stored
    ]
    kept = {slot[2]: outline.carried.tensor(names[slot[2]]) for slot in buffers}
    with placed(parameter_slots(module), given), placed(buffers, kept):
        module.save_pretrained(destination)
