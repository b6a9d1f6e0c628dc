"""Chips to train on: a rate each of matmuls, of memory and of the network, with their sources."""

import tomllib
from math import inf
from pathlib import Path

from pydantic import ValidationError

from twinstream.cost.refusal import CostError
from twinstream.cost.work.decoder import Size
from twinstream.hardware_profiles.schema import Number
from twinstream.schedule.errors import did_you_mean
from twinstream.schedule.files import parse_toml, read_text
from twinstream.schedule.node import Node

_DATA = Path(__file__).parent / "chips"
_ENDING = ".toml"


class Chip(Node):
    """What an estimate takes a device to be.

    Fields:
        num_gpus: GPUs of the device, which is more than one where a pod is taken for one.
        flop_per_s_8bit: peak of dense matmuls in 8 bits; in b bits it is 8 / b of that.
        memory_bytes_per_s: peak of reading and writing device memory.
        network_bytes_per_s: of sending and receiving together.
    """

    name: str
    description: str
    num_gpus: Size
    flop_per_s_8bit: Number
    memory_bytes_per_s: Number
    network_bytes_per_s: Number

    def with_network(self, network_bytes_per_s: float) -> "Chip":
        """The same chip on another network.

        Raises:
            CostError: it moves nothing.
        """
        if not 0 < network_bytes_per_s < inf:
            raise CostError(
                f"--network-bandwidth needs to be more than 0 bytes/s, got {network_bytes_per_s:g}"
            )
        rate = Number(value=network_bytes_per_s, kind="assumed", source="--network-bandwidth")
        return self.model_copy(update={"network_bytes_per_s": rate})


def chip_names() -> tuple[str, ...]:
    """Names of the chips that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob(f"*{_ENDING}")))


def load_chip(name_or_file: str) -> Chip:
    """A chip of the package by its name, or one of a TOML file.

    Raises:
        CostError: there is none, or a number of it is missing or wrong.
    """
    shipped = name_or_file in chip_names()
    if not shipped and not name_or_file.endswith(_ENDING):
        near = did_you_mean(name_or_file, chip_names())
        hint = f"{near}; " if near else ""
        raise CostError(
            f"unknown chip '{name_or_file}': {hint}there are {', '.join(chip_names())}, and files "
            f"like theirs whose names end in {_ENDING}"
        )
    path = _DATA / f"{name_or_file}{_ENDING}" if shipped else Path(name_or_file)
    try:
        document = parse_toml(read_text(path))
    except OSError as error:
        raise CostError(f"cannot read chip {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        raise CostError(f"{path} is not a TOML file: {error}") from None
    return _checked(document, path)


def rate_of(chip: Chip, field: str) -> float:
    """One of the chip's rates.

    Raises:
        CostError: it is zero or has no limit.
    """
    number: Number = getattr(chip, field)
    if not number.value:
        raise CostError(f"{field} of chip {chip.name} needs to be more than zero")
    return number.value


def _checked(document: dict[str, object], path: Path) -> Chip:
    try:
        chip = Chip.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CostError(f"{path}: {field}: {first['msg']}") from None
    for field in ("flop_per_s_8bit", "memory_bytes_per_s", "network_bytes_per_s"):
        rate_of(chip, field)
    return chip
