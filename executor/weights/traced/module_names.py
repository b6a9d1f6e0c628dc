"""Every tensor of a folder's files: which of a module's it is, or carried, or refused by name."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.modules.building import build_module, build_whole
from twinstream.executor.modules.whole.text_part import names_in_whole
from twinstream.executor.weights.carried_tensors.carried import CarriedTensors, require_tied
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.executor.weights.traced.module_conversion import Conversion
from twinstream.models.decoders.config import next_token_count
from twinstream.models.providers.traced import ModuleSource, TracedModel

_ROTARY = "rotary_emb.inv_freq"  # that old versions of transformers saved
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModuleNames:
    """The names that a module's tensors have in a folder's files.

    Attributes:
        plain: by the module's names of parameters and buffers, those that are stored as they are.
        converted: names in files of those that transformers makes others of, by one of these.
        carried: names in files of what is written back as it was.
        conversion: None where this version of transformers has no table, or the code is other
            people's.
    """

    plain: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    conversion: Conversion | None = None

    @classmethod
    def of(
        cls, model: TracedModel, folder: Path, stored: Mapping[str, StoredTensor]
    ) -> "ModuleNames":
        """
        Raises:
            WeightsError: a tensor is neither the module's nor another part's, or two that are one
                have different values.
        """
        module = plain_module(model)
        found: list[tuple[ModuleNames, _Sorting]] = []
        for candidate, conversion in _candidates(model, module):
            sorting = _Sorting(candidate, conversion, stored)
            found.append((sorting.names(), sorting))
        names, sorting = max(found, key=lambda one: one[1].count)  # the whole model is the first
        require_tied(folder, sorting.tied_pairs(), stored)
        config = model.source.config or getattr(module, "config", None)
        if model.source.kind == "remote" and not names.has_all(module):
            return names  # its own code makes the tensors of others
        if unknown := [n for n in sorting.unread if not _is_next_token(n, config)]:
            raise WeightsError(
                folder,
                f"has tensors that '{model.name}' does not have: {some_of(sorted(unknown))}: "
                "transformers would leave them out; do config.json and the weights belong "
                "together?",
            )
        return names.with_carried([*names.carried, *sorting.unread])

    def has_all(self, module: Any) -> bool:
        """Return whether the files have all parameters as the module has them."""
        return all(name in self.plain for name, _ in module.named_parameters())

    def with_carried(self, carried: Iterable[str]) -> "ModuleNames":
        return ModuleNames(self.plain, self.converted, tuple(carried), self.conversion)

    @classmethod
    def as_transformers_writes(cls, model: TracedModel) -> "ModuleNames":
        """Return the names that transformers would write for a model without a folder."""
        module = plain_module(model)
        own = {name: name for name in module.state_dict()}
        return cls(conversion=_table(model, module, own))

    def carried_of(self, model: TracedModel, stored: Mapping[str, StoredTensor]) -> CarriedTensors:
        """Return the tensors that are written back as they were, and buffers that no file has."""
        there = stored_buffers(model)
        buffers = {name: there[name] for name in there if name not in self.plain}
        if self.conversion is not None and buffers:
            buffers = self.conversion.stored(buffers)
        kept = [*self.carried, *(self.plain[name] for name in there if name in self.plain)]
        return CarriedTensors.of({name: stored[name] for name in kept}, model.dtype, buffers)


def plain_module(model: TracedModel) -> Any:
    """The module without adapters and without memory."""
    return _plain(model.source, getattr(torch, model.dtype))


def _plain(source: ModuleSource, dtype: torch.dtype) -> Any:
    return build_module(source.model_copy(update={"lora": None, "loss": None}), dtype, None)


def stored_buffers(model: TracedModel) -> dict[str, torch.Tensor]:
    """The first values of the buffers that files have and no step changes."""
    module = plain_module(model)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    changed = {buffer.name for buffer in model.buffers if buffer.is_state}
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if name not in parameters | changed
    }


def layers_in_whole(model: TracedModel) -> dict[str, str]:
    """Return the whole model's names of a text part's layers; empty for a whole model."""
    return whole_of(model.source)[1]


def whole_of(source: ModuleSource) -> tuple[Any, dict[str, str]]:
    """The class of the whole model of a text part, and what the part's layers are called there."""
    whole = build_whole(source)
    if whole is None:
        return None, {}
    names = names_in_whole(whole, _plain(source, torch.float32))
    layers = {ours.rpartition(".")[0]: theirs.rpartition(".")[0] for ours, theirs in names.items()}
    return type(whole), layers


def left_out(
    module: Any, stored: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """The tensors of files that a module of transformers leaves out without a word, and layers for
    a token further on."""
    ignored = _ignored(module)
    return {
        name: one
        for name, one in stored.items()
        if any(re.search(pattern, name) for pattern in ignored) or _is_next_token(name, config)
    }


def _candidates(model: TracedModel, module: Any) -> Iterable[tuple[Any, Conversion | None]]:
    own = {name: name for name in module.state_dict()}
    whole = build_whole(model.source)
    if whole is not None:
        names = names_in_whole(whole, module)
        if (table := _table(model, whole, names)) is None:
            raise WeightsError(
                Path(model.name),
                "is the text part of a larger model, whose files are read with transformers 5 only",
            )
        yield whole, table
    yield module, _table(model, module, own)


def _table(model: TracedModel, module: Any, names: Mapping[str, str]) -> Conversion | None:
    if model.source.kind != "transformers":
        return None
    try:
        return Conversion(module, names)
    except ImportError:
        return None


class _Sorting:
    """The tensors of files, by what they are of a module.

    Attributes:
        count: how many are the trained module's.
        unread: names of those that the folder's module has not.
    """

    def __init__(
        self, module: Any, conversion: Conversion | None, stored: Mapping[str, StoredTensor]
    ) -> None:
        self._module, self._conversion = module, conversion
        there = module.state_dict(keep_vars=True)
        names = {id(tensor): name for name, tensor in _named(module)}
        self._first = {name: names.get(id(tensor), name) for name, tensor in there.items()}
        self._plain: dict[str, str] = {}
        self._converted: dict[str, list[str]] = {}
        self._aliases: list[tuple[str, str]] = []
        self._carried: list[str] = []
        self.unread: list[str] = []
        self._ignored = _ignored(module)
        unsaved = {name for name, _ in module.named_buffers()}
        for name in stored:
            self._sort(name, unsaved)
        self.count = len(self._plain) + sum(map(len, self._converted.values()))

    def _sort(self, name: str, unsaved: set[str]) -> None:
        to, is_converted = self._target(name)
        if to not in self._first:
            is_known = to in unsaved or name.endswith(_ROTARY) or self._is_ignored(name, to)
            (self._carried if is_known else self.unread).append(name)
            return
        ours = to if self._conversion is None else self._conversion.ours(self._first[to])
        if ours is None:
            self._carried.append(name)
        elif is_converted:
            self._converted.setdefault(ours, []).append(name)
        elif self._first[to] != to:
            self._aliases.append((name, ours))
        else:
            self._plain[ours] = name

    def _target(self, name: str) -> tuple[str, bool]:
        if self._conversion is not None:
            return self._conversion.target(name)
        prefix = f"{getattr(self._module, 'base_model_prefix', '')}."
        for to in (name, f"{prefix}{name}", name.removeprefix(prefix)):
            if to in self._first:
                return to, False
        return name, False

    def _is_ignored(self, *names: str) -> bool:
        return any(re.search(pattern, name) for pattern in self._ignored for name in names)

    def tied_pairs(self) -> list[tuple[str, str]]:
        """Names in files of tensors that the module has once."""
        return [(name, self._plain[to]) for name, to in self._aliases if to in self._plain]

    def names(self) -> ModuleNames:
        """Return the names; a tensor that files have only under an alias is found there."""
        alone = {to: name for name, to in self._aliases if to not in self._plain}
        return ModuleNames(
            alone | self._plain, self._converted, tuple(self._carried), self._conversion
        )


def _named(module: Any) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _ignored(module: Any) -> list[str]:
    """Patterns of names that a class of transformers leaves out without a word."""
    parts = (getattr(part, "_keys_to_ignore_on_load_unexpected", None) for part in module.modules())
    return [pattern for found in parts for pattern in found or ()]


def _is_next_token(name: str, config: Any) -> bool:
    """Whether a tensor is of a layer behind the last, which predicts a token further on."""
    told = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    told = told.get("text_config") or told
    layers, match = told.get("num_hidden_layers"), _LAYER.search(name)
    if match is None or not isinstance(layers, int):
        return False
    return layers <= int(match[1]) < layers + next_token_count(told)
