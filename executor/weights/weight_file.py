"""A safetensors file that is written weight by weight, out of flat tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from twinstream.executor.weights.durable_files import writing
from twinstream.executor.weights.safetensors_header import DTYPES, NewTensor, new_header
from twinstream.models.hf_weights import HfWeight


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
            NewTensor(weight.name, DTYPES[weight.dtype or dtype], weight.shape) for weight in inside
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
                file.write(content[weight.offset_bytes : weight.end_bytes])
