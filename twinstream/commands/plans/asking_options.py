"""The options of `whatif` that say what changes, and by how much."""

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from twinstream.schedule.errors import TwinstreamError

CHANGES = "-50%,-10%,+10%,+100%"
_MOST_CHANGE = 100.0


class ChangesError(TwinstreamError):
    """Changes that cannot be read."""


@dataclass(frozen=True)
class WhatIfOptions:
    """What to change, and by how much."""

    changes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=f"How much each property changes; by default {CHANGES}, of a cluster +100% (and "
            "memory -50%).",
        ),
    ] = None
    written: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="With --cluster: instead of each property by itself, change these together. May "
            "be given again: a number of the cluster or its machine (nic_bytes_per_s=1e11, "
            "device_memory_bytes=24GiB, levels.spine.oversubscription=2), gpus, global_batch, "
            "seq_len, precision, price_per_gpu_hour, a field of the layout (tp=4, tp=open).",
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Search the smallest memory or link for 12000tok/s, or for 95% of what compute "
            "alone could do.",
        ),
    ] = None
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; by default one a core.")
    ] = None

    @property
    def num_jobs(self) -> int:
        return self.jobs or os.cpu_count() or 1


def changes_of(text: str) -> tuple[float, ...]:
    """
    >>> changes_of("-50%, +100%")
    (-0.5, 1.0)

    Raises:
        ChangesError: the text is no such list.
    """
    found = []
    for part in text.split(","):
        try:
            change = float(part.strip().removesuffix("%")) / 100 if "%" in part else float(part)
        except ValueError:
            change = -1.0
        if change >= 1 and "%" not in part:
            raise ChangesError(
                f"the change '{part.strip()}' has no %: write {change:g}% or {100 * change:g}%"
            )
        if not -1.0 < change <= _MOST_CHANGE or change == 0:
            raise ChangesError(
                f"cannot read the change '{part.strip()}'; write a list as -50%,-10%,+10%,+100% "
                "(more than -100%, and not 0)"
            )
        found.append(change)
    if len(set(found)) < len(found):
        raise ChangesError(f"'{text}' names a change twice")
    return tuple(found)
