"""Weights that transformers stores as other tensors than the module has, a group at a time.

transformers itself makes all of them at once, so that a model would be there twice; it is told here
of one group's tensors at a time, and does the same with them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.modules.building import parameter_slots, placed
from twinstream.executor.modules.module_weights import flat_group
from twinstream.executor.weights.codes.coded_tensor import STORED_DTYPES, CodedTensor, LazyValues
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.models.hf_weights import HfWeight
from twinstream.models.layout import ADAPTERS, InnerTensor
from twinstream.models.traced import TracedModel


class Conversion:
    """Between the tensors of a folder and a module's, as transformers' own table has it.

    Raises:
        ImportError: this version of transformers has no such table, or does not convert by it.
    """

    def __init__(self, module: Any, model: TracedModel) -> None:
        from transformers import conversion_mapping, core_model_loading, modeling_utils

        self._module, self._model = module, model
        self._loading: Any = core_model_loading
        self._transforms: Any = conversion_mapping.get_model_conversion_mapping(module)
        self._settings: Any = modeling_utils.LoadStateDictConfig
        self._convert = self._loading.convert_and_load_state_dict_in_model
        if "tp_plan" in signature(self._convert).parameters:  # as some versions have it
            self._convert = partial(self._convert, tp_plan=None)
        self._groups = [g for g in model.parameter_groups if not g.startswith(ADAPTERS)]
        self._group_of = {inner.name: g for g in self._groups for inner in self._inside(g)}

    def _inside(self, group: str) -> Sequence[InnerTensor]:
        return self._model.group_layout(group).tensors

    def read(
        self, folder: Path, stored: Mapping[str, StoredTensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The flat parameters of each group of a folder that has these tensors, 1-D uint8.

        Raises:
            WeightsError: a tensor is missing or of another shape, or a file is broken.
        """
        inside = self._by_group(stored)
        for group in self._groups:
            yield group, self._read(folder, group, {name: stored[name] for name in inside[group]})

    def _by_group(self, stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
        """Names of stored tensors by the group that they are made into.

        Raises:
            WeightsError: one is of codes.
        """
        loading, module = self._loading, self._module
        renamings, converters = (
            [one for one in self._transforms if isinstance(one, kind)]
            for kind in (loading.WeightRenaming, loading.WeightConverter)
        )
        expected, found = module.state_dict(), defaultdict[str, list[str]](list)
        for name in stored:
            told = (module.base_model_prefix, expected)
            to, _ = loading.rename_source_key(name, renamings, converters, *told)
            if to not in expected and name in expected:
                to, _ = loading.rename_source_key(name, [], [], *told)
            if to in self._group_of:
                require_values(name, stored[name], expected[to])
                found[self._group_of[to]].append(name)
        return found

    def _read(self, folder: Path, group: str, stored: Mapping[str, StoredTensor]) -> torch.Tensor:
        from safetensors import SafetensorError

        module, slots = self._module, parameter_slots(self._module)
        empty = dict(module.named_parameters())
        settings = self._settings(dtype=self._dtype, weight_mapping=self._transforms)
        try:
            lazily = lazy_tensors(stored, self._dtype)
            with placed(slots, empty):
                about, _ = self._convert(model=module, state_dict=lazily, load_config=settings)
                made = dict(module.named_parameters())
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise WeightsError(folder, f"transformers cannot load it: {reason}") from None
        what = f"its weights are not those of '{self._model.name}': "
        if failed := sorted(map(str, about.conversion_errors)):
            raise WeightsError(folder, f"{what}transformers cannot convert {some_of(failed)}")
        if wrong := sorted(name for name, *_ in about.mismatched_keys):
            raise WeightsError(folder, f"{what}{some_of(wrong)} of another shape")
        if missing := sorted(
            inner.name for inner in self._inside(group) if made[inner.name].is_meta
        ):
            raise WeightsError(folder, f"{what}{some_of(missing)} missing")
        return flat_group(self._model, group, made)

    def weights(self) -> list[HfWeight]:
        """What is stored, group by group, in the places that `stored_flat` gives it."""
        found = []
        for group in self._groups:
            shapes = {
                inner.name: torch.empty(inner.shape, dtype=self._dtype, device="meta")
                for inner in self._inside(group)
            }
            made = self._reverted(shapes)
            sizes = [tensor.nbytes for tensor in made.values()]
            starts = accumulate(sizes, initial=0)
            found += [
                HfWeight(name, tuple(tensor.shape), group, start, tensor.nbytes)
                for (name, tensor), start in zip(made.items(), starts, strict=False)
            ]
        return found

    def stored_flat(self, group: str, flat: torch.Tensor) -> torch.Tensor:
        """A group's flat parameters as the bytes of what is stored of them, one after the other."""
        views = {
            inner.name: flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes]
            .view(self._dtype)
            .view(inner.shape)
            for inner in self._inside(group)
        }
        made = self._reverted(views)
        return torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in made.values()])

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._model.dtype)
        return found

    def _reverted(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = self._loading.revert_weight_conversion(
            self._module, dict(tensors)
        )
        return made


def require_values(name: str, stored: StoredTensor, made: torch.Tensor) -> None:
    """
    Raises:
        WeightsError: what is stored for a tensor of a module are whole numbers or bytes, not
            values of it.
    """
    if made.is_floating_point() and stored.dtype not in STORED_DTYPES:
        raise WeightsError(
            stored.file,
            f"has {name} in {stored.dtype}, where only {', '.join(STORED_DTYPES)} are values; give "
            "the folder that is not quantised",
        )


def lazy_tensors(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, Any]:
    """As transformers' loading takes them: each is read, and decoded, when it is needed."""
    import safetensors

    open_one: Any = safetensors.safe_open
    plain = {name: one for name, one in stored.items() if not isinstance(one, CodedTensor)}
    opened = {file: open_one(file, framework="pt") for file in {o.file for o in plain.values()}}
    coded = {
        name: LazyValues(one, dtype) for name, one in stored.items() if isinstance(one, CodedTensor)
    }
    return coded | {name: opened[one.file].get_slice(name) for name, one in plain.items()}
