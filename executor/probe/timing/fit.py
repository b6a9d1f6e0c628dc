"""Fit `time = fixed + amount / rate` to a few measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
