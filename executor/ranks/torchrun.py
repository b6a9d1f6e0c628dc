"""What torchrun, or whoever else set its variables, says of this process among all ranks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.schedule.errors import ArgumentError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class StartedRank:
    """One of `size` ranks that somebody has started, on one of `hosts` machines.

    Every machine has `local_size` of them, those of a machine one after the other; `local_rank` is
    the rank's place there. All reach the machine of rank 0 at `address`, and a store at `port`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @property
    def hosts(self) -> int:
        """How many machines the ranks are on."""
        return self.size // self.local_size

    @staticmethod
    def here() -> "StartedRank | None":
        """This process; None where nobody has started it as a rank.

        Raises:
            ArgumentError: a variable is missing, is no number, or contradicts another.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return None
        if missing := [name for name in ENVIRONMENT if name not in os.environ]:
            raise not_started(missing)
        rank, size = _count("RANK", 0), _count("WORLD_SIZE", 1)
        local_size = _count("LOCAL_WORLD_SIZE", 1, size)
        if size % local_size or rank >= size:
            raise ArgumentError(
                f"RANK={rank}, WORLD_SIZE={size}, LOCAL_WORLD_SIZE={local_size}: every machine has "
                "to have as many ranks"
            )
        local_rank = _count("LOCAL_RANK", 0, rank % local_size)
        port = _count("MASTER_PORT", 1)
        return StartedRank(rank, size, local_rank, local_size, os.environ["MASTER_ADDR"], port)


def not_started(missing: Sequence[str]) -> ArgumentError:
    """What is said where variables are missing."""
    return ArgumentError(
        f"{', '.join(missing)} is not set: start ranks with torchrun, which sets "
        f"{', '.join(ENVIRONMENT)}"
    )


def _count(name: str, least: int, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal() or int(text) < least:
        raise ArgumentError(f"{name}={text!r} is no whole number of {least} or more")
    return int(text)
