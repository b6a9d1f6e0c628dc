"""A safetensors file that is written weight by weight, out of flat tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from twinstream.executor.weights.durable_files import writing
from twinstream.executor.weights.safetensors_header import DTYPES, NewTensor, new_header
from twinstream.models.decoders.hf_weights import HfWeight

_OF_SIZE = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class WeightFile:
    """A file to be: its first bytes, where in it each tensor begins, and its size."""

    path: Path
    header: bytes
    starts: Mapping[str, int]
    size_bytes: int

    @classmethod
    def of(cls, path: Path, dtype: str, inside: Sequence[HfWeight]) -> "WeightFile":
        """One that holds these weights, of a model of `dtype`; nothing is written yet."""
        tensors = [
            NewTensor(weight.name, _code(weight.dtype or dtype), weight.shape) for weight in inside
        ]
        return cls(path, *new_header(tensors))

    def create(self) -> None:
        """Write the header, and have room for all that follows.

        Raises:
            WeightsError: it cannot be written, or is there already.
        """
        with writing(self.path, self.size_bytes), self.path.open("xb") as file:
            file.write(self.header)
            file.truncate(self.size_bytes)

    def write(self, weights: Sequence[HfWeight], flat: torch.Tensor) -> None:
        """Write those of some weights of one flat tensor that the file holds.

        Raises:
            WeightsError: it cannot be written.
        """
        mine = [weight for weight in weights if weight.name in self.starts]
        if not mine:
            return
        content = flat.numpy().data
        with writing(self.path, self.size_bytes), self.path.open("r+b") as file:
            for weight in mine:
                file.seek(self.starts[weight.name])
                if weight.axes:
                    file.write(as_stored(weight, flat).numpy().data)
                else:
                    file.write(content[weight.offset_bytes : weight.end_bytes])


def _code(dtype: str) -> str:
    """Safetensors' name of a dtype of ours; its own names are what they are."""
    return DTYPES.get(dtype, dtype)


def as_stored(weight: HfWeight, flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a weight whose axes have another order in files, in that order."""
    return _elements(weight, flat).permute(weight.axes).reshape(-1).view(torch.uint8)


def fill_from_stored(weight: HfWeight, values: torch.Tensor, flat: torch.Tensor) -> None:
    """Put what a file has of such a weight, of its dtype in the flat tensor, in its place there."""
    inside = _elements(weight, flat)
    there = inside.permute(weight.axes)
    there.copy_(values.view(inside.dtype).view(there.shape))


def _elements(weight: HfWeight, flat: torch.Tensor) -> torch.Tensor:
    itemsize = weight.size_bytes // prod(weight.shape)
    inside = flat[weight.offset_bytes : weight.end_bytes]
    return inside.view(_OF_SIZE[itemsize]).view(weight.flat_shape)
