"""A traced module's weights as transformers has them in a folder, both ways."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.modules.adapters import is_adapter
from twinstream.executor.modules.building import build_module, parameter_slots, placed
from twinstream.executor.modules.module_weights import flat_groups
from twinstream.executor.weights.durable_files import make_room, sync, write_files, writing
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.hf_files import has_weights
from twinstream.executor.weights.model_files import CONFIG, model_config, tokenizer_files
from twinstream.executor.weights.module_adapters import tensors_of, write_module_adapters
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
    folder: Path, model: TracedModel
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """The groups of a folder: transformers reads its files and makes the module's tensors of them.

    Adapters are not among them. For a while all of them are there beside the state.

    Raises:
        WeightsError: a file is missing or broken, or they are not the module's.
    """
    yield from flat_groups(model, _read(folder, model))


def _read(folder: Path, model: TracedModel) -> dict[str, torch.Tensor]:
    if model.source.kind == "python":
        return _read_own(folder, model)
    return dict(loaded_module(folder, model.dtype, f"'{model.name}'").named_parameters())


def loaded_module(folder: Path, dtype: str, what: str) -> Any:
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


def _read_own(folder: Path, model: TracedModel) -> dict[str, torch.Tensor]:
    """What `write_module_folder` wrote of a module that is not transformers'."""
    path = folder / _OWN
    found = tensors_of(path)
    tensors = [tensor for group in model.groups for tensor in group.tensors]
    names = [one.name for one in tensors if not (model.source.lora and is_adapter(one.name))]
    if missing := [name for name in names if name not in found]:
        raise WeightsError(path, f"lacks {some_of(missing)}")
    return found


_OWN = "model.safetensors"


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
        if model.source.lora is not None:
            write_module_adapters(destination, model.source.lora, parameters, outline.base)
        elif model.source.kind == "python":
            from safetensors.torch import save_file

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
