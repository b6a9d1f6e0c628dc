"""Random parameters for measuring, in place, without the minutes that billions of draws take."""

import torch

from twinstream.executor.kernels.operand import DTYPES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.providers.trained import layout_of
from twinstream.models.recipes.recipe import Recipe

_STD = 0.02
_BLOCK_ELEMENTS = 2**24


class RandomWeights:
    """One drawn block of normal values (std 0.02), laid end to end over all parameters.

    The same seed gives every element of a model the same value, whatever slot it is written to.
    Norms are one, biases zero, and so are the B matrices of the recipe's adapters.
    """

    def __init__(
        self, spec: ModelSpec, seed: int, num_elements: int = _BLOCK_ELEMENTS,
        recipe: Recipe | None = None,
    ) -> None:  # fmt: skip
        self._spec, self._recipe = spec, recipe or Recipe()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(num_elements).normal_(0.0, _STD, generator=generator)
        self._block = drawn.to(DTYPES[spec.dtype])

    def write(self, group: str, start_bytes: int, destination: torch.Tensor) -> None:
        """Bytes of a group's flat parameters, from `start_bytes` on; 1-D uint8 on any device."""
        dtype, itemsize = DTYPES[self._spec.dtype], self._spec.itemsize
        values = destination.view(dtype)
        first = start_bytes // itemsize
        self._tile(values, first)
        for inner in layout_of(self._spec, self._recipe, group).tensors:
            begin = max(inner.offset_bytes // itemsize, first) - first
            end = min((inner.offset_bytes + inner.size_bytes) // itemsize - first, values.numel())
            if begin < end and inner.name.endswith("norm"):
                values[begin:end].fill_(1.0)
            elif begin < end and inner.name.endswith(("bias", "_b")):
                values[begin:end].zero_()

    def _tile(self, values: torch.Tensor, first: int) -> None:
        at, length = 0, self._block.numel()
        while at < values.numel():
            inside = (first + at) % length
            count = min(length - inside, values.numel() - at)
            values[at : at + count].copy_(self._block[inside : inside + count])
            at += count
