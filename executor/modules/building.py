"""Builds the module of a source with parameters on the meta device and real buffers."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from twinstream.executor.modules.adapters import add_adapters
from twinstream.executor.modules.batches import NAMED, named_inputs
from twinstream.executor.modules.blocks import OWN_LOSS, ModuleRefusal, told_of
from twinstream.executor.modules.calling import POSITIONS, hold_frequencies
from twinstream.executor.modules.whole.text_part import (
    has_our_head,
    text_config,
    text_module,
    whole_class,
)
from twinstream.models.decoders.quantization import QUANTIZATION_KEYS, without_codes
from twinstream.models.options import MOST_LAYERS
from twinstream.models.providers.traced import ModuleSource
from twinstream.schedule.files import real_path
from twinstream.schedule.python_file import (
    digest_of,
    digest_of_code,
    note_named,
    object_of_file,
    require_own_code,
)

Slot = tuple[dict[str, Any], str, str]  # a module's dictionary, the key in it, the tensor's name


def build_module(
    source: ModuleSource, dtype: torch.dtype, attention: str | None, *,
    with_parameters: bool = False,
) -> nn.Module:  # fmt: skip
    """The module in training mode: parameters have no memory, buffers their first values, which are
    the same in every process where they are drawn.

    Args:
        attention: eager or sdpa; None is sdpa where the class has it.

    Raises:
        ModuleRefusal: transformers has no causal decoder of this config; or it has no such
            attention; or the file is not what it was; or only sizes are known.
    """
    _require_code(source)
    with torch.device("cpu"), nullcontext() if with_parameters else _without_parameters():
        if source.kind == "python":
            module = _from_python(source).to(dtype).train()
        elif source.kind == "remote":
            module = _from_folder(source, dtype, attention).train()
        else:
            module = _from_config(source, dtype, attention).train()
        limit = hold_frequencies(module, by_document=source.rotary == "by_document")
        setattr(module, POSITIONS, limit)
        setattr(module, NAMED, named_inputs(module))
        if source.lora is not None:
            add_adapters(module, source.lora)
        if source.loss is not None:
            setattr(module, OWN_LOSS, source.loss.load())
        return module


def has_own_loss(source: ModuleSource) -> bool:
    """Whether the loss is a person's own, given beside the module or by its file."""
    if source.loss is not None or source.kind != "python":
        return source.loss is not None
    return getattr(build_module(source, torch.float32, None), OWN_LOSS, None) is not None


def is_text_part(source: ModuleSource) -> bool:
    """Whether what is built is a part of what the config describes."""
    if source.kind != "transformers":
        return False
    config = _config_of(source)
    return text_config(config) is not config


def require_own_class(source: ModuleSource) -> None:
    """
    Raises:
        ModuleRefusal: transformers has no class of what is trained, so that no folder of it could
            be written without the rest; or only sizes are known.
    """
    _require_code(source)
    if is_text_part(source) and has_our_head(text_config(_config_of(source))):
        raise ModuleRefusal(
            f"transformers has no class of the text part of '{(source.config or {})['model_type']}'"
            " alone, so that random weights of it could not be saved: give a folder with weights"
        )


def _require_code(source: ModuleSource) -> None:
    if source.kind == "layers":
        raise ModuleRefusal(
            "of this model sizes and costs are known, and no code, so that it is planned and not "
            "run: give the module itself, FILE.py:FUNCTION (examples/vit.py, examples/dlrm.py)"
        )


def build_whole(source: ModuleSource) -> Any | None:
    """The whole model of a config with a text part, without memory; None where there is no other.

    Raises:
        ModuleRefusal: transformers has none of this config, or cannot build it here.
    """
    if not is_text_part(source):
        return None
    config = _config_of(source)
    kind: Any = whole_class(config, (source.config or {}).get("architectures"))
    try:
        with torch.device("cpu"), _parameters_on_meta():
            return kind._from_config(config, dtype=torch.float32)
    except Exception as error:
        raise ModuleRefusal(
            f"transformers cannot build the {kind.__name__} whose text part is trained, and whose "
            f"tensors its files have: {told_of(error)}"
        ) from error


def _config_of(source: ModuleSource) -> Any:
    """The config of transformers' own class."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    given = json.loads(json.dumps(without_codes(source.config or {})), object_hook=with_floats)
    model_type = str(given.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ModuleRefusal(
            f"this version of transformers has no model type '{model_type}': update transformers, "
            "or give a Python file that builds the module (FILE.py:FUNCTION)"
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(given)
    except Exception as error:  # its checks, and what its classes trip over
        is_told = isinstance(error, StrictDataclassError | ValueError)
        why = " ".join(str(error).split()) if is_told else told_of(error)
        raise ModuleRefusal(
            f"transformers refuses this config of model type '{model_type}': {why}"
        ) from None


def _from_config(source: ModuleSource, dtype: torch.dtype, attention: str | None) -> nn.Module:
    config = _config_of(source)
    _require_buildable(text_config(config))
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        module = text_module(text_config(config), dtype=dtype, **chosen)
    except Exception as error:
        raise ModuleRefusal(
            f"transformers builds no causal decoder of model type '{config.model_type}': "
            f"{_what_else(source.config or {}) or told_of(error)}"
        ) from None
    _keep_buffers_in_float32(module, dtype)
    for part in module.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):  # asks the device; no padding
            part.warn_if_padding_and_no_attention_mask = _no_warning
    choosable: Any = getattr(module, "_can_set_experts_implementation", None)
    if choosable is not None and choosable():  # of transformers 5
        # The other implementations ask the device how many tokens each expert has.
        module.set_experts_implementation("grouped_mm")
    assert isinstance(module, nn.Module)
    return module


def _require_buildable(config: Any) -> None:
    """Before a module is built, which takes milliseconds a layer."""
    count = getattr(config, "num_hidden_layers", None)
    if isinstance(count, int) and not 0 < count <= MOST_LAYERS:
        raise ModuleRefusal(f"num_hidden_layers is {count:,}; it is from 1 to {MOST_LAYERS:,}")


def _what_else(config: dict[str, Any]) -> str:
    """What a model is that is no decoder of text alone, and what to do; empty if unknown."""
    if "text_config" in config:
        return "its text part has a config of its own: give that"
    reads = [what for key, what in _BESIDE_TEXT.items() if key in config]
    if not reads:
        return ""
    return f"it reads {' and '.join(reads)} beside text, and its config names no text part"


_BESIDE_TEXT = {"vision_config": "images", "audio_config": "sound", "video_config": "videos"}


def _from_folder(source: ModuleSource, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """By the code in a folder, which transformers runs where it is trusted."""
    from transformers import AutoConfig, AutoModelForCausalLM

    assert source.path is not None
    folder = Path(source.path)
    if digest_of_code(folder) != source.sha256:
        raise ModuleRefusal(
            f"the code or config of {folder} is not what was traced: trace it again"
        )
    chosen: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    require_own_code(folder)
    try:
        with offline():
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=True, local_files_only=True
            )
            _require_buildable(config)
            config.use_cache = False
            drop_codes(config)
            build: Any = AutoModelForCausalLM.from_config
            module = build(config, dtype=dtype, trust_remote_code=True, **chosen)
    except ModuleRefusal:
        raise
    except Exception as error:
        raise ModuleRefusal(f"the code of {folder} builds no module: {told_of(error)}") from error
    assert isinstance(module, nn.Module)
    return module


@contextmanager
def offline() -> Iterator[None]:
    """Nothing is fetched from the hub, whatever a config names."""
    from huggingface_hub import constants

    with patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


def drop_codes(config: Any) -> None:
    """Make a configuration of transformers that of a model whose weights are values."""
    for key in QUANTIZATION_KEYS:
        if hasattr(config, key):
            delattr(config, key)


def _keep_buffers_in_float32(module: Any, dtype: torch.dtype) -> None:
    """Those that transformers, when it loads weights, keeps so whatever the dtype."""
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    stored = module.state_dict().keys()
    for place, key, name in buffer_slots(module) if dtype == torch.bfloat16 else ():
        if name in stored and any(part in name for part in kept):
            place[key] = place[key].float()


def with_floats(value: dict[str, Any]) -> Any:
    """What is infinite, or no number, as transformers writes it into JSON."""
    return float(value["__float__"]) if set(value) == {"__float__"} else value


def _no_warning(*_: Any) -> None:
    """In place of what looks into the tokens."""


def _from_python(source: ModuleSource) -> nn.Module:
    assert source.path is not None and source.function is not None
    path = Path(source.path)
    if digest_of(path) != source.sha256:
        raise ModuleRefusal(
            f"{path} is not the file that was traced: trace it again with twinstream trace"
        )
    function = object_of_file(path, source.function)
    try:
        module = function()
    except Exception as error:
        raise ModuleRefusal(
            f"'{source.function}' of {path} fails with {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModuleRefusal(
            f"'{source.function}' of {path} returns a {type(module).__name__}, not a "
            "torch.nn.Module"
        )
    return module


def python_source(path: Path, function: str) -> ModuleSource:
    """The source of a module that a function of a file builds."""
    path = real_path(path)
    digest = digest_of(path)
    note_named(digest)
    return ModuleSource(kind="python", path=str(path), function=function, sha256=digest)


def parameter_slots(module: nn.Module) -> list[Slot]:
    """Where the parameters of a module hang; one that is shared has several slots and one name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        (part._parameters, key, names[id(parameter)])
        for part in module.modules()
        for key, parameter in part._parameters.items()
        if parameter is not None
    ]


def buffer_slots(module: nn.Module) -> list[Slot]:
    """Where the buffers of a module hang."""
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    return [
        (part._buffers, key, names[id(buffer)])
        for part in module.modules()
        for key, buffer in part._buffers.items()
        if buffer is not None
    ]


def tensor_names(module: nn.Module) -> dict[int, str]:
    """Names of parameters and buffers by their identity."""
    everything = (*module.named_parameters(), *module.named_buffers())
    return {id(tensor): name for name, tensor in everything}


@contextmanager
def placed(slots: list[Slot], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """These tensors are the module's parameters or buffers for a while."""
    before = [place[key] for place, key, _ in slots]
    try:
        for place, key, name in slots:
            place[key] = tensors[name]
        yield
    finally:
        for (place, key, _), tensor in zip(slots, before, strict=True):
            place[key] = tensor


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Parameters have no memory, and what is drawn follows from no other random numbers."""
    with torch.random.fork_rng(devices=[]), _parameters_on_meta():
        torch.manual_seed(0)
        yield


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as soon as they are registered; buffers are made as ever.

    What initialises parameters afterwards then costs nothing.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            kept = {**parameter.__dict__, "requires_grad": parameter.requires_grad}
            kind = type(parameter)
            module._parameters[name] = kind(parameter.detach().to("meta"), **kept)

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield
