"""How far predicted bytes of a GPU are from those of published runs, by what trained there.

A layout that is priced has the bytes of its tensors. What a framework had beside them is known
where it printed what its allocator reserved; of runs that ran it is known that the GPU had room.
"""

import csv
from collections.abc import Mapping
from importlib.resources import files
from math import sqrt
from statistics import fmean
from typing import Literal, NamedTuple, Self, get_args

from twinstream.schedule.sizes import gib

Framework = Literal["megatron", "torch_fsdp", "xla", "deepspeed"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
COLUMNS = ("framework", "series", "predicted_bytes", "room_bytes", "reserved_bytes")
_NAMES: Mapping[Framework, str] = {
    "megatron": "Megatron-LM", "torch_fsdp": "PyTorch's FSDP", "xla": "XLA",
    "deepspeed": "DeepSpeed",
}  # fmt: skip
_DEVIATION = 1.25  # a standard deviation is so many mean absolute ones, of a normal distribution


class RunMemory(NamedTuple):
    """What published runs of a framework say of predicted bytes, as fractions of a GPU's memory.

    `over` is the most by which a run that ran was predicted to need more than there was, of
    `num_ran` whose recompute is stated. `extra` is what the allocator reserved beyond the tensors'
    bytes, `bar` how far that may be off, of `num_reserved` runs (None of none).
    """

    framework: Framework
    num_ran: int
    over: float
    num_reserved: int
    extra: float | None
    bar: float | None

    @classmethod
    def of(cls, framework: Framework, runs: list[tuple[int, int, int | None]]) -> Self:
        """Of runs: their predicted bytes, those of the GPU, and those reserved where published.

        >>> RunMemory.of("xla", [(81, 80, None), (40, 80, 60), (50, 80, 66)])
        RunMemory(framework='xla', num_ran=3, over=0.0125, num_reserved=2, extra=0.225, bar=0.0383)
        """
        over = max([0.0, *((predicted - room) / room for predicted, room, _ in runs)])
        beside = [
            (reserved - predicted) / room
            for predicted, room, reserved in runs
            if reserved is not None
        ]
        count = len(beside)
        if not count:
            return cls(framework, len(runs), over, 0, None, None)
        extra = fmean(beside)
        off = fmean(abs(one - extra) for one in beside)
        bar = round(_DEVIATION * off * sqrt(1 + 1 / count), 4)
        return cls(framework, len(runs), over, count, extra, bar)

    @property
    def told(self) -> str:
        """Return in words what is known of a framework's memory."""
        name = _NAMES[self.framework]
        said = f"{self.num_ran} published runs of {name} ran where at most {self.over:.1%} more "
        said += "than a GPU has was predicted"
        if self.extra is not None and self.bar is not None:
            said += (
                f"; in {self.num_reserved} its allocator reserved {self.extra:.0%} +/- "
                f"{self.bar:.0%} of the GPU's memory beyond its tensors"
            )
        return said

    def shortage(self, needs_bytes: int, room_bytes: int) -> str:
        """Return how much too much bytes are, and whether that is within the error."""
        over = needs_bytes / room_bytes - 1
        told = f"{gib(needs_bytes)} of a GPU's {gib(room_bytes)}, {over:.1%} too much"
        if over > self.over:
            return f"{told}: more than the error of such predictions, {self.over:.1%}"
        return f"{told}: within the error of such predictions, {self.over:.1%}, so it may fit"


def memory_of_runs() -> RunMemory:
    """Return what is known of the kernel set that layouts are priced with."""
    return published_memory()[1]["megatron"]


def published_memory() -> tuple[str, Mapping[Framework, RunMemory]]:
    """Return where the table of published runs is from, and what it says of each framework."""
    package = files("twinstream.hardware_profiles")
    text = package.joinpath("clusters", "data", "published_memory.csv").read_text("utf-8")
    source, *lines = text.splitlines()
    runs: dict[str, list[tuple[int, int, int | None]]] = {}
    for line in csv.DictReader(lines):
        reserved = int(line["reserved_bytes"]) if line["reserved_bytes"] else None
        one = int(line["predicted_bytes"]), int(line["room_bytes"]), reserved
        runs.setdefault(line["framework"], []).append(one)
    found = {name: RunMemory.of(name, runs[name]) for name in FRAMEWORKS if name in runs}
    return source.removeprefix("# "), found
