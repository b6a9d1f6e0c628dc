"""Fit `time = fixed + amount / rate` to a few measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinstream.schedule.errors import TwinstreamError

_LINK_BYTES = 2**20  # a smaller copy costs more than any line says: an H200's of 64 KiB 12 us
_MOST_RESIDUAL, _FEWEST_SIZES = 0.05, 3


class UnsteadyLinkError(TwinstreamError):
    """Copies take times that no line gives, so that none of them can be relied on."""


@dataclass(frozen=True)
class Line:
    """Fixed ns per launch, ns per unit of amount, and the worst relative residual."""

    fixed_ns: float
    ns_per_unit: float
    residual: float

    def efficiency(self, nominal_per_s: float) -> tuple[float, float]:
        """(max, half) of the curve that gives the same times at this nominal rate.

        Where that takes a max over 1.5, which no curve may have, the fixed part still holds.
        """
        maximum = min(1e9 / (nominal_per_s * self.ns_per_unit), 1.5)
        return maximum, self.fixed_ns * nominal_per_s * maximum / 1e9


def fit_line(amounts: Sequence[float], times_ns: Sequence[float]) -> Line:
    """Least squares of relative errors, both coefficients kept non-negative."""
    x, y = np.asarray(amounts, dtype=float), np.asarray(times_ns, dtype=float)
    design = np.stack([1.0 / y, x / y], axis=1)
    fixed, slope = np.linalg.lstsq(design, np.ones_like(y), rcond=None)[0]
    if fixed < 0.0:
        fixed, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    if slope <= 1e-3 * fixed / x.max():  # time does not grow with the amount: it is a fixed cost
        fixed = float((1.0 / y).sum() / (1.0 / y**2).sum())
        slope = 1e-3 * fixed / float(x.max())
    worst = float(np.abs((fixed + slope * x) / y - 1.0).max())
    return Line(float(fixed), float(slope), worst)


def fit_link(name: str, sizes_bytes: Sequence[float], times_ns: Sequence[float]) -> Line:
    """The line of a link's copies of 1 MiB and more; if it is over 5 % off, of larger ones alone.

    Schedules copy megabytes, and a copy of some KiB has a cost of its own, which would make the
    fixed part too large and the rate too high.

    Raises:
        UnsteadyLinkError: even the three largest sizes are over 5 % off their line.
    """
    pairs = sorted((s, t) for s, t in zip(sizes_bytes, times_ns, strict=True) if s >= _LINK_BYTES)
    line = fit_line(*zip(*pairs, strict=True))
    while line.residual > _MOST_RESIDUAL and len(pairs) > _FEWEST_SIZES:
        pairs = pairs[1:]
        line = fit_line(*zip(*pairs, strict=True))
    if line.residual > _MOST_RESIDUAL:
        told = ", ".join(f"{size / 2**20:g} MiB {size / ns:.1f} GB/s" for size, ns in pairs)
        raise UnsteadyLinkError(
            f"copies {name} are {line.residual:.0%} off any line ({told}): something else uses the "
            "link; probe again"
        )
    return line
