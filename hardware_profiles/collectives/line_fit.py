"""The least of a few alpha-beta lines, fitted to times over sizes by relative error."""

from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Line = tuple[float, float]

_LEAST_SIZES = 2  # of a line: fewer would fit anything
_ROUNDS = 12
_SCALE = 0.02  # relative errors beyond it count as their size, not as its square


def fit_lines(size_bytes: Floats, time_ns: Floats, num_lines: int) -> tuple[Line, ...]:
    """Lines (alpha ns, beta ns per byte), the least of which is the time; fewer if they are enough.

    Sizes are cut into as many runs of neighbours as there are lines, in every way; each run gets
    the line of least (robust) relative error, neither term below 0. The cut is kept whose least of
    lines has the smallest mean relative error on all points; then each line is fitted again to the
    points where it is the least, while that helps. The same input gives the same bits.

    Args:
        size_bytes, time_ns: [num_points], positive; sizes may repeat.
    """
    sizes = np.unique(size_bytes)
    starts = range(_LEAST_SIZES, len(sizes) - _LEAST_SIZES + 1)
    known: dict[tuple[int, int], Line] = {}

    def line_of(low: int, high: int) -> Line:
        if (low, high) not in known:
            inside = (size_bytes >= sizes[low]) & (size_bytes <= sizes[high - 1])
            known[low, high] = _one_line(size_bytes[inside], time_ns[inside])
        return known[low, high]

    best: tuple[float, tuple[Line, ...]] | None = None
    for cut in combinations(starts, num_lines - 1):
        bounds = (0, *cut, len(sizes))
        runs = list(pairwise(bounds))
        if any(high - low < _LEAST_SIZES for low, high in runs) and num_lines > 1:
            continue
        lines = tuple(line_of(low, high) for low, high in runs)
        found = mean_error(lines, size_bytes, time_ns), lines
        if best is None or found[0] < best[0]:
            best = found
    if best is None:
        return fit_lines(size_bytes, time_ns, num_lines - 1)
    return _polished(best[1], best[0], size_bytes, time_ns)


def least_of(lines: tuple[Line, ...], size_bytes: Floats) -> Floats:
    """Nanoseconds at each size: [num_points]."""
    alpha_beta = np.array(lines)
    times: Floats = np.min(alpha_beta[:, :1] + alpha_beta[:, 1:] * size_bytes, axis=0)
    return times


def mean_error(lines: tuple[Line, ...], size_bytes: Floats, time_ns: Floats) -> float:
    """Mean of |fitted / measured - 1|."""
    return float(np.mean(np.abs(least_of(lines, size_bytes) / time_ns - 1)))


def _polished(
    lines: tuple[Line, ...], error: float, size_bytes: Floats, time_ns: Floats
) -> tuple[Line, ...]:
    for _ in range(_ROUNDS):
        alpha_beta = np.array(lines)
        owner = np.argmin(alpha_beta[:, :1] + alpha_beta[:, 1:] * size_bytes, axis=0)
        tried = tuple(
            _one_line(size_bytes[owner == i], time_ns[owner == i])
            for i in range(len(lines))
            if np.any(owner == i)  # a line that is nowhere the least is none
        )
        found = mean_error(tried, size_bytes, time_ns)
        if found >= error and len(tried) == len(lines):
            break
        lines, error = tried, found
    return lines


def _one_line(size_bytes: Floats, time_ns: Floats) -> Line:
    """Robust least squares of alpha / t + beta x / t = 1 with alpha, beta >= 0."""
    columns = np.stack([1 / time_ns, size_bytes / time_ns])
    weights = np.ones_like(time_ns)
    line = (0.0, 0.0)
    for _ in range(_ROUNDS):
        line = _not_negative(columns, weights)
        errors = np.abs(line[0] * columns[0] + line[1] * columns[1] - 1)
        weights = _SCALE / np.maximum(errors, _SCALE)
    return line


def _not_negative(columns: Floats, weights: Floats) -> Line:
    aa, ab, bb = (
        float(np.sum(weights * columns[i] * columns[j])) for i, j in ((0, 0), (0, 1), (1, 1))
    )
    a, b = (float(np.sum(weights * column)) for column in columns)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # One of both is at 0: the one that leaves the smaller squares.
    return (a / aa, 0.0) if a * a / aa >= b * b / bb else (0.0, b / bb)
