"""Rewrite the shipped profiles of machines without data with efficiencies of a fitted relative.

    python -m benchmarks.accuracy.borrowed_profiles

A machine's own numbers stay. Attention of the GeForce cards comes from the H100: the RTX 3090's
recorded forward attention is four times slower than its backward, which is no property of GeForce
cards at large (docs/benchmarks/accuracy.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.accuracy.borrowing import borrowed
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.profile_files import MACHINES_FOLDER

# Mean errors of borrowing where it could be tested, docs/benchmarks/accuracy.md.
_TEST = "borrowing was off by {} % on average in a test: {}'s efficiencies on {}'s runs"
H100_NOTE = _TEST.format(19, "h100", "rtx3090")
RTX3090_NOTE = _TEST.format(14, "rtx3090", "h100")


@dataclass(frozen=True)
class Relative:
    """Whose curves to take, and which."""

    name: str
    note: str
    wanted: Callable[[str], bool] = lambda _: True


def _attention(key: str) -> bool:
    return key.startswith("attention")


def _no_attention(key: str) -> bool:
    return not _attention(key)


def _kernels(key: str) -> bool:
    return key not in ("h2d", "d2h")


def _h200(key: str) -> bool:
    return key not in ("hbm", "vector", "swiglu", "adamw")


H100 = Relative("h100", H100_NOTE)
GEFORCE = (
    Relative("rtx3090", RTX3090_NOTE, _no_attention),
    Relative("h100", H100_NOTE, _attention),
)
RELATIVES = {
    "a100": (H100,),
    "b200": (H100,),
    "mi300x": (H100,),
    "gh200": (Relative("h100", H100_NOTE, _kernels),),
    "h200": (Relative("h100", H100_NOTE, _h200),),
    "rtx4090": GEFORCE,
    "rtx5090": GEFORCE,
}


def main() -> None:
    for name, relatives in RELATIVES.items():
        machine = load_machine(name)
        for relative in relatives:
            found = load_machine(relative.name)
            machine = borrowed(machine, found, relative.note, relative.wanted)
        save_machine(machine, MACHINES_FOLDER / f"{name}.toml")


if __name__ == "__main__":
    main()
