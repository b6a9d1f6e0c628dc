"""Classes of machines that the `ml_dataflow` policy has constants for.

They are constants of the seed system's code, not of a profile: nothing fitted changes a plan of it.
"""

import re
from dataclasses import dataclass
from typing import Literal

from twinstream.schedule.errors import TwinstreamError


class UnknownMachineClass(TwinstreamError):
    """The seed system has no constants for this machine."""


@dataclass(frozen=True)
class MachineClass:
    """A GPU as the seed system's code knows it.

    `link_gib_per_s` is its nominal rate, 0.25 GiB/s x 2^(generation - 1) x lanes. The tiles of
    attention's backward kernel (queries, keys) size its workspace: by head_dim, at most 64 or at
    most 128. Flash-attn 2 sizes it by the number of multiprocessors instead.
    """

    name: str
    min_chunk_tokens: int
    peak_flop_per_s: float
    link_gib_per_s: float
    workspace: Literal["flash3", "flash2"]
    tiles_64: tuple[int, int] = (128, 128)
    tiles_128: tuple[int, int] = (64, 128)
    num_multiprocessors: int = 0

    @property
    def link_bytes_per_s(self) -> float:
        return self.link_gib_per_s * 2**30

    def tiles(self, head_dim: int) -> tuple[int, int]:
        return self.tiles_64 if head_dim <= 64 else self.tiles_128


def machine_classes() -> tuple[MachineClass, ...]:
    """All classes; link rates are PCIe 5.0 or 4.0 x16."""
    return (
        MachineClass("h100", 16384, 989e12, 64.0, "flash3"),
        MachineClass("a100", 16384, 312e12, 32.0, "flash3"),
        MachineClass(
            "rtx3090", 8192, 71e12, 32.0, "flash3", tiles_64=(64, 128), tiles_128=(64, 96)
        ),
        MachineClass(
            "rtx5090", 8192, 209.5e12, 64.0, "flash2", num_multiprocessors=170
        ),
    )  # fmt: skip


def machine_class(name: str) -> MachineClass:
    """The class whose name is a word of a machine's name: `NVIDIA H100 80GB`, `fitted_h100`,
    `RTX 3090 Ti`.

    Raises:
        UnknownMachineClass: there is none; the message lists what there is.
    """
    plain = re.sub(r"rtx[ _-]*", " rtx", name.lower())
    for found in machine_classes():
        if re.search(rf"(?<![a-z0-9]){found.name}(?![0-9])", plain):
            return found
    known = ", ".join(found.name for found in machine_classes())
    raise UnknownMachineClass(
        f"policy 'ml_dataflow' has no constants for machine '{name}'; it knows names that contain "
        f"{known}. In a table, name the policy of twinstream's own runs in a column 'policy' "
        "(optimal, streaming, ...)"
    )
