"""Weights that transformers stores as other tensors than the module has, a few at a time.

transformers itself makes all of them at once, so that a model would be there twice; it is told here
of one group's tensors at a time, and does the same with them.
"""

from collections.abc import Collection, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.modules.building import parameter_slots, placed
from twinstream.executor.weights.codes.coded_tensor import STORED_DTYPES, CodedTensor, LazyValues
from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.executor.weights.safetensors_header import StoredTensor


class Conversion:
    """Converts tensors of a folder to a module's and back, by transformers' own table.

    Args:
        module: that the folder is of.
        names: what tensors of the module that is trained are called in that one.

    Raises:
        ImportError: this version of transformers has no such table, or does not convert by it.
    """

    def __init__(self, module: Any, names: Mapping[str, str]) -> None:
        from transformers import conversion_mapping, core_model_loading, modeling_utils

        self._module, self._names = module, names
        self._ours = {theirs: name for name, theirs in names.items()}
        self._loading: Any = core_model_loading
        self._transforms: Any = conversion_mapping.get_model_conversion_mapping(module)
        self._renamings, self._converters = (
            [one for one in self._transforms if isinstance(one, kind)]
            for kind in (core_model_loading.WeightRenaming, core_model_loading.WeightConverter)
        )
        self._expected = module.state_dict()
        self._settings: Any = modeling_utils.LoadStateDictConfig
        self._convert = self._loading.convert_and_load_state_dict_in_model
        if "tp_plan" in signature(self._convert).parameters:  # as some versions have it
            self._convert = partial(self._convert, tp_plan=None)

    def target(self, name: str) -> tuple[str, bool]:
        """Return a stored tensor's name in the folder's module, and whether it is converted."""
        told = (self._module.base_model_prefix, self._expected)
        rename = self._loading.rename_source_key
        to, pattern = rename(name, self._renamings, self._converters, *told)
        if to not in self._expected and name in self._expected:
            to, pattern = rename(name, [], [], *told)
        return str(to), pattern is not None

    def read(
        self,
        folder: Path,
        wanted: Collection[str],
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """Tensors of the trained module, made of stored ones.

        Raises:
            WeightsError: a tensor is missing, of another shape or of codes, or a file is broken.
        """
        from safetensors import SafetensorError

        for name, one in stored.items():
            require_values(name, one, self._expected[self.target(name)[0]])
        module, slots = self._module, parameter_slots(self._module)
        empty = dict(module.named_parameters())
        settings = self._settings(dtype=dtype, weight_mapping=self._transforms)
        try:
            lazily = lazy_tensors(stored, dtype)
            with placed(slots, empty):
                about, _ = self._convert(model=module, state_dict=lazily, load_config=settings)
                found = dict(module.named_parameters())
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise WeightsError(folder, f"transformers cannot load it: {reason}") from None
        what = f"its weights are not those of '{module.config.model_type}': "
        if failed := sorted(map(str, about.conversion_errors)):
            raise WeightsError(folder, f"{what}transformers cannot convert {some_of(failed)}")
        if wrong := sorted(name for name, *_ in about.mismatched_keys):
            raise WeightsError(folder, f"{what}{some_of(wrong)} of another shape")
        made = {name: found[self._names[name]] for name in wanted}
        if missing := sorted(name for name, tensor in made.items() if tensor.is_meta):
            raise WeightsError(folder, f"{what}{some_of(missing)} missing")
        return made

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what transformers stores for tensors of the trained module, by names in files."""
        given = {self._names[name]: tensor for name, tensor in tensors.items()}
        made: dict[str, torch.Tensor] = self._loading.revert_weight_conversion(self._module, given)
        return made

    def ours(self, theirs: str) -> str | None:
        """Return the trained module's name of a tensor of the folder's module, or None."""
        return self._ours.get(theirs)


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
    """Return tensors for transformers' loading; each is read, and decoded, when it is needed."""
    import safetensors

    open_one: Any = safetensors.safe_open
    plain = {name: one for name, one in stored.items() if not isinstance(one, CodedTensor)}
    opened = {file: open_one(file, framework="pt") for file in {o.file for o in plain.values()}}
    coded = {
        name: LazyValues(one, dtype) for name, one in stored.items() if isinstance(one, CodedTensor)
    }
    return coded | {name: opened[one.file].get_slice(name) for name, one in plain.items()}
