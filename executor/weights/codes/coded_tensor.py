"""A stored matrix whose bytes are codes: to readers a tensor of its values' shape and dtype."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch

from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.schedule.files import open_file, reason_of

VALUES = "F32"  # what decoded values are, before they are rounded once
AT_A_TIME = 2**20  # codes, of which temporaries are some 4 MiB each
_EXPONENT_BIAS = 127  # of a scale that is a power of two (E8M0)
STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # values
EXPONENTS = ("F8_E8M0", "U8")
SCALE_DTYPES = (*STORED_DTYPES, *EXPONENTS)


@dataclass(frozen=True)
class CodedTensor(StoredTensor, ABC):
    """Codes, and what is stored beside them to read them by.

    Attributes:
        name: of the matrix, as a model calls it.
        parts: what is read, by what it is.
    """

    name: str
    parts: Mapping[str, StoredTensor]

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that have the codes and scales of this tensor."""
        return tuple({part.file for part in self.parts.values()})

    @abstractmethod
    def decode_into(self, out: torch.Tensor) -> None:
        """Fill a contiguous tensor of as many elements with the values, rounded to its dtype once.

        Raises:
            WeightsError: a file has gone or changed, or scales in it are not finite.
        """


class LazyValues:
    """A stored matrix as transformers' loading takes it: read when it is indexed."""

    def __init__(self, coded: CodedTensor, dtype: torch.dtype) -> None:
        self._coded, self._dtype = coded, dtype

    def __getitem__(self, where: object) -> torch.Tensor:
        values = torch.empty(self._coded.shape, dtype=self._dtype)
        self._coded.decode_into(values)
        found: torch.Tensor = values[where]  # type: ignore[index]
        return found

    def get_shape(self) -> list[int]:
        """Return the shape of the values that the codes stand for."""
        return list(self._coded.shape)

    def get_dtype(self) -> str:
        """Return the dtype of the values under its name in a safetensors file."""
        return VALUES


def read_bytes(
    stored: StoredTensor, name: str, start: int = 0, count: int | None = None
) -> torch.Tensor:
    """Some of a tensor's bytes, 1-D uint8.

    Raises:
        WeightsError: the file cannot be read, or ends before.
    """
    made = torch.empty(stored.size_bytes if count is None else count, dtype=torch.uint8)
    try:
        with open_file(stored.file) as file:
            file.seek(stored.start_bytes + start)
            fill(file, made, name)
    except OSError as error:
        raise WeightsError(stored.file, f"cannot be read: {reason_of(error)}") from None
    return made


def read_scales(stored: StoredTensor, name: str) -> torch.Tensor:
    """float32, in the stored shape; bytes are exponents of two.

    Raises:
        WeightsError: the file cannot be read, or one of them is not finite.
    """
    read = read_bytes(stored, name)
    if stored.dtype in EXPONENTS:
        scales = (read.float() - _EXPONENT_BIAS).exp2()
    else:
        scales = read.view(STORED_DTYPES[stored.dtype]).float()
    return finite(scales, stored, name).view(stored.shape)


def finite(scales: torch.Tensor, stored: StoredTensor, name: str) -> torch.Tensor:
    """
    Raises:
        WeightsError: a scale is infinite or no number.
    """
    if count := int((~scales.isfinite()).sum()):
        raise WeightsError(
            stored.file,
            f"is damaged: of the {scales.numel()} scales of {name}, {count} are infinite or no "
            "numbers; fetch it again",
        )
    return scales


def fill(file: BufferedReader, destination: torch.Tensor, name: str) -> None:
    """Read as many bytes as the destination, 1-D uint8, has.

    Raises:
        WeightsError: the file ends before.
    """
    num_bytes = file.readinto(destination.numpy().data)
    if num_bytes != destination.numel():
        raise WeightsError(
            Path(file.name),
            f"ends within {name}, though it was long enough before: it has been changed",
        )
