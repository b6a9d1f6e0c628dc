"""The groups of a traced model as tensors of files, for who writes them one after another."""

from itertools import accumulate

import torch

from twinstream.executor.weights.traced.module_names import ModuleNames
from twinstream.models.decoders.hf_weights import HfWeight
from twinstream.models.layout import ADAPTERS
from twinstream.models.providers.traced import TracedModel


class StoredGroups:
    """The stored tensors of each group: under the name of the folder where it has them as they
    are, the others as transformers makes them."""

    def __init__(self, model: TracedModel, names: ModuleNames) -> None:
        self._model, self._names = model, names
        self._groups = [g for g in model.parameter_groups if not g.startswith(ADAPTERS)]
        self._dtype: torch.dtype = getattr(torch, model.dtype)

    @property
    def is_known(self) -> bool:
        """Return whether what is stored is known without the module's own code."""
        inside = (t.name for group in self._groups for t in self._model.group_layout(group).tensors)
        return self._names.conversion is not None or all(n in self._names.plain for n in inside)

    def weights(self) -> list[HfWeight]:
        """Return the stored tensors, group by group, in the places that `flat` gives them."""
        found = []
        for group in self._groups:
            if self._is_as_it_is(group):
                found += [
                    HfWeight(self._names.plain[t.name], t.shape, group, t.offset_bytes,
                             t.size_bytes)
                    for t in self._model.group_layout(group).tensors
                ]  # fmt: skip
                continue
            shapes = {
                inner.name: torch.empty(inner.shape, dtype=self._dtype, device="meta")
                for inner in self._model.group_layout(group).tensors
            }
            made = self._made(shapes)
            sizes = [tensor.nbytes for tensor in made.values()]
            starts = accumulate(sizes, initial=0)
            found += [
                HfWeight(name, tuple(tensor.shape), group, start, tensor.nbytes)
                for (name, tensor), start in zip(made.items(), starts, strict=False)
            ]
        return found

    def flat(self, group: str, flat: torch.Tensor) -> torch.Tensor:
        """A group's flat parameters as the bytes of what is stored of them, one after the other;
        as they lie where all are stored as they are."""
        if self._is_as_it_is(group):
            return flat
        views = {
            inner.name: flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes]
            .view(self._dtype)
            .view(inner.shape)
            for inner in self._model.group_layout(group).tensors
        }
        made = self._made(views)
        return torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in made.values()])

    def _is_as_it_is(self, group: str) -> bool:
        inside = self._model.group_layout(group).tensors
        return all(inner.name in self._names.plain for inner in inside)

    def _made(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plain = self._names.plain
        kept = {plain[name]: tensor for name, tensor in tensors.items() if name in plain}
        others = {name: tensor for name, tensor in tensors.items() if name not in plain}
        if others:
            assert self._names.conversion is not None
            kept |= self._names.conversion.stored(others)
        return kept
