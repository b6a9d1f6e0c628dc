"""Chips to train on: a rate each of matmuls, of memory and of the network, with their sources."""

from pathlib import Path
from typing import Annotated

from pydantic import ValidationError

from twinstream.cost.bill import CostError
from twinstream.hardware_profiles.schema import Number
from twinstream.schedule.errors import did_you_mean
from twinstream.schedule.files import parse_toml, read_text
from twinstream.schedule.node import Node, size

_CHIPS = Path(__file__).parent / "chips"
_RATES = ("flop_per_s_8bit", "memory_bytes_per_s", "network_bytes_per_s")


class Chip(Node):
    """What an estimate takes a device to be.

    Fields:
        num_gpus: GPUs of the device, which is more than one where a pod is taken for one.
        flop_per_s_8bit: peak of dense matmuls in 8 bits; in b bits it is 8 / b of that.
        memory_bytes_per_s: peak of reading and writing device memory.
        network_bytes_per_s: of sending and receiving together.
        memory_size_bytes: of device memory, against which nothing but the weights is held.
    """

    name: str
    description: str
    num_gpus: Annotated[int, size("GPUs of the device.")]
    flop_per_s_8bit: Number
    memory_bytes_per_s: Number
    network_bytes_per_s: Number
    memory_size_bytes: Number | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its own, and that of its family: H100 of an H100_x64_pod."""
        return self.name, self.name.partition("_")[0]

    def rate(self, field: str) -> float:
        """One of the chip's rates.

        Raises:
            CostError: it is zero or has no limit.
        """
        number: Number = getattr(self, field)
        if not number.value:
            raise CostError(f"{field} of chip {self.name} needs to be more than zero")
        return number.value


def chip_names() -> tuple[str, ...]:
    """Names of the chips that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _CHIPS.glob("*.toml")))


def load_chip(name_or_file: str) -> Chip:
    """A chip of the package by its name in any case, or one of a TOML file.

    Raises:
        CostError: there is none, or a number of it is missing or wrong.
    """
    shipped = next((one for one in chip_names() if one.lower() == name_or_file.lower()), None)
    if shipped is None and not name_or_file.endswith(".toml"):
        near = did_you_mean(name_or_file, chip_names())
        hint = f"{near}; " if near else ""
        raise CostError(
            f"unknown chip '{name_or_file}': {hint}there are {', '.join(chip_names())}, and files "
            "like theirs whose names end in .toml"
        )
    path = Path(name_or_file) if shipped is None else _CHIPS / f"{shipped}.toml"
    try:
        chip = Chip.model_validate(parse_toml(read_text(path)))
    except OSError as error:
        raise CostError(f"cannot read chip {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CostError(f"{path}: {field}: {first['msg']}") from None
    except ValueError as error:
        raise CostError(f"{path} is not a TOML file: {error}") from None
    for field in _RATES:
        chip.rate(field)
    return chip
