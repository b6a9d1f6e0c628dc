"""Polynomials in the size of a chunk through measured points, exactly."""

import math
from fractions import Fraction
from functools import lru_cache

from twinstream.models.traced_costs import Poly

Size = tuple[int, int]  # B, S


def fit(values: dict[Size, int]) -> tuple[Poly, float]:
    """A polynomial through all points but the last, and its relative error there."""
    *sizes, check = values
    powers, inverse, divisor = _inverse(tuple(sizes))
    known = [values[size] for size in sizes]
    coefficients: list[int | float] = [0] * 6
    for power, row in zip(powers, inverse, strict=True):
        times = sum(x * y for x, y in zip(row, known, strict=True))
        coefficients[power] = times // divisor if times % divisor == 0 else times / divisor
    while coefficients and coefficients[-1] == 0:
        coefficients.pop()
    poly = Poly(coefficients=tuple(coefficients))
    error = abs(poly.at(*check) - values[check]) / max(1, values[check])
    return poly, error


@lru_cache
def _inverse(sizes: tuple[Size, ...]) -> tuple[list[int], list[list[int]], int]:
    """Powers of the polynomial, and what times the values gives its coefficients: whole numbers,
    to be divided by the last."""
    powers = [0, 2, 4] if all(batch == 1 for batch, _ in sizes) else list(range(6))
    rows = [[(1, b, s, b * s, s * s, b * s * s)[power] for power in powers] for b, s in sizes]
    size = len(rows)
    table = [
        [Fraction(x) for x in (*row, *(int(i == j) for j in range(size)))]
        for i, row in enumerate(rows)
    ]
    for at in range(size):  # Gauss, exactly
        pivot = next(i for i in range(at, size) if table[i][at])
        table[at], table[pivot] = table[pivot], table[at]
        table[at] = [x / table[at][at] for x in table[at]]
        for i in range(size):
            if i != at and (factor := table[i][at]):
                table[i] = [x - factor * y for x, y in zip(table[i], table[at], strict=True)]
    inverse = [row[size:] for row in table]
    divisor = math.lcm(*(x.denominator for row in inverse for x in row))
    return powers, [[int(x * divisor) for x in row] for row in inverse], divisor
