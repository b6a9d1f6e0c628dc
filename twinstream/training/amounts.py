"""Numbers in a user's words: steps or a share of them, steps or minutes, a file and its weight."""

import re
from dataclasses import dataclass
from pathlib import Path

from twinstream.data.options import Source
from twinstream.schedule.errors import ArgumentError

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_WEIGHTED = re.compile(r"(.+)=([0-9.eE+-]+)")


@dataclass(frozen=True)
class Every:
    """How often something is done: every so many steps, or seconds; never where both are None."""

    steps: int | None = None
    seconds: float | None = None

    def is_due(self, step: int, since_s: float) -> bool:
        """After a step, so many seconds after the last time."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and since_s >= self.seconds


def every(name: str, text: str) -> Every:
    """
    >>> every("save_every", "500"), every("save_every", "30min")
    (Every(steps=500, seconds=None), Every(steps=None, seconds=1800.0))

    Raises:
        ArgumentError: it is neither steps nor a time.
    """
    if text == "never":
        return Every()
    if re.fullmatch("[1-9][0-9]{0,11}", text):
        return Every(steps=int(text))
    found = _TIME.fullmatch(text)
    if found is None or not float(found[1]):
        raise ArgumentError(
            f"{name} '{text:.40}' is neither a number of steps (500), nor a time (90s, 30min, 2h), "
            "nor never"
        )
    return Every(seconds=float(found[1]) * _SECONDS[found[2]])


def steps_of(name: str, text: str, num_steps: int) -> int:
    """
    >>> steps_of("warmup", "3%", 200), steps_of("warmup", "50", 200)
    (6, 50)

    Raises:
        ArgumentError: it is neither a number of steps nor a share of them.
    """
    try:
        if text.endswith("%"):
            share = float(text.removesuffix("%")) / 100
            if 0.0 <= share <= 1.0:
                return round(share * num_steps)
        elif re.fullmatch("[0-9]{1,12}", text):
            return int(text)
    except ValueError:
        pass
    raise ArgumentError(f"{name} '{text:.40}' is neither a number of steps (100) nor a share (3%)")


def source_of(text: str) -> Source:
    """A file or folder, with a weight behind `=`, as `chat.jsonl=0.5`.

    Raises:
        DataError: the weight is out of range.
    """
    found = _WEIGHTED.fullmatch(text)
    if found is None or Path(text).exists():
        return Source(Path(text))
    try:
        weight = float(found[2])
    except ValueError:
        return Source(Path(text))
    return Source(Path(found[1]), weight)
