"""Points to curves: how many lines, or a table, by the error on sizes that were left out.

A curve's lines are the least of a few alpha-beta lines, fitted by relative error.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from twinstream.hardware_profiles.clusters.curves import (
    MOST_LINES,
    Collective,
    CollectiveCurve,
    interpolated,
)
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.reading import CollectivePoint
from twinstream.hardware_profiles.errors import CollectiveTableError

Floats = npt.NDArray[np.float64]
Line = tuple[float, float]

_LEAST_SIZES = 2  # of a line or a table: fewer would fit anything
_ROUNDS = 12
_SCALE = 0.02  # relative errors beyond it count as their size, not as its square
_US = 1e3  # ns
_DIGITS = 6
_CLEARLY = 0.75  # of the table's error: lines below it are taken

Series = tuple[Collective, int, int, str]  # collective, ranks, ranks per node, dtype


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
    # Squares weighted by scale / max(|error|, scale): beyond the scale each counts as its size.
    for _ in range(_ROUNDS):
        line = _not_negative(columns, weights)
        errors = np.abs(line[0] * columns[0] + line[1] * columns[1] - 1)
        weights = _SCALE / np.maximum(errors, _SCALE)
    return line


def _not_negative(columns: Floats, weights: Floats) -> Line:
    # The normal equations: [aa ab; ab bb] (alpha, beta) = (a, b).
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


@dataclass(frozen=True)
class Form:
    """A curve without its provenance: lines or a table of (bytes, ns)."""

    lines: tuple[Line, ...] = ()
    points: tuple[tuple[float, float], ...] = ()

    def times_ns(self, size_bytes: Floats) -> Floats:
        """[num_points] of ns."""
        if self.lines:
            return least_of(self.lines, size_bytes)
        return np.array([interpolated(self.points, size) for size in size_bytes])

    def errors(self, size_bytes: Floats, time_ns: Floats) -> Floats:
        """|predicted / measured - 1|: [num_points]."""
        errors: Floats = np.abs(self.times_ns(size_bytes) / time_ns - 1)
        return errors


@dataclass(frozen=True)
class FittedCurve:
    """A curve with its mean errors: on the points it was made of, and on sizes left out.

    `left_out_error` is of each inner size, predicted by the same form made of the others; None
    where there are too few sizes.
    """

    curve: CollectiveCurve
    num_points: int
    error: float
    left_out_error: float | None


def by_series(points: Iterable[CollectivePoint]) -> dict[Series, list[CollectivePoint]]:
    """Points by what one curve is of, in order of name, ranks, placement, dtype."""
    found: dict[Series, list[CollectivePoint]] = defaultdict(list)
    for point in points:
        key = (point.collective, point.ranks, point.ranks_per_node, point.dtype or "")
        found[key].append(point)
    return {key: found[key] for key in sorted(found)}


def fit_curves(points: Iterable[CollectivePoint], source: str) -> tuple[FittedCurve, ...]:
    """A curve for each collective, number of ranks, placement and dtype.

    Args:
        source: what was measured and when, for the source of each curve.

    Raises:
        CollectiveTableError: a series has a single size.
    """
    return tuple(_fitted(key, series, source) for key, series in by_series(points).items())


def arrays(points: Sequence[CollectivePoint]) -> tuple[Floats, Floats]:
    """Bytes and ns of points, by size: each [num_points]."""
    found = sorted((point.size_bytes, point.time_us * _US) for point in points)
    size_bytes, time_ns = np.array(found, dtype=np.float64).T
    return size_bytes, time_ns


def fit_form(size_bytes: Floats, time_ns: Floats) -> tuple[Form, float | None]:
    """The form with the least error on inner sizes that it had not seen, and that error.

    Lines are taken only where they are clearly better than the table, whose own error is even over
    series (docs/benchmarks/clusters.md). With under four sizes: a table.
    """
    sizes = np.unique(size_bytes)
    if len(sizes) < 4:
        return form_of("table", size_bytes, time_ns), None
    errors = {name: _left_out(name, sizes, size_bytes, time_ns) for name in FORMS}
    shares = {name: error * (_CLEARLY if name == "table" else 1) for name, error in errors.items()}
    best = min(FORMS, key=lambda name: shares[name])  # ties: the first, the simplest
    return form_of(best, size_bytes, time_ns), errors[best]


FORMS = (*(f"lines {count}" for count in range(1, MOST_LINES + 1)), "table")


def form_of(name: str, size_bytes: Floats, time_ns: Floats) -> Form:
    """One of `FORMS`, made of points.

    A table has the geometric mean of a size's times, which is as far from each of two in ratio.
    """
    if name != "table":
        return Form(lines=fit_lines(size_bytes, time_ns, int(name.split()[1])))
    means: Mapping[float, float] = {
        float(size): _middle(time_ns[size_bytes == size]) for size in np.unique(size_bytes)
    }
    return Form(points=tuple(means.items()))


def _middle(times_ns: Floats) -> float:
    if len(times_ns) == 1:
        return float(times_ns[0])
    return float(np.exp(np.mean(np.log(times_ns))))


def _left_out(name: str, sizes: Floats, size_bytes: Floats, time_ns: Floats) -> float:
    errors: list[float] = []
    for size in sizes[1:-1]:
        out = size_bytes == size
        form = form_of(name, size_bytes[~out], time_ns[~out])
        errors += form.errors(size_bytes[out], time_ns[out]).tolist()
    return float(np.mean(errors))


def _fitted(key: Series, series: Sequence[CollectivePoint], source: str) -> FittedCurve:
    size_bytes, time_ns = arrays(series)
    collective, ranks, ranks_per_node, dtype = key
    if len(np.unique(size_bytes)) < _LEAST_SIZES:
        raise CollectiveTableError(
            f"{collective} of {ranks} ranks has {len(np.unique(size_bytes))} size; a curve needs "
            f"{_LEAST_SIZES} or more"
        )
    form, left_out = fit_form(size_bytes, time_ns)
    error = float(np.mean(form.errors(size_bytes, time_ns)))
    unseen = "" if left_out is None else f", {left_out:.1%} on each inner size left out"
    curve = CollectiveCurve(
        collective=collective,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        dtype=dtype or None,
        lines=tuple((_short(alpha), _short(beta)) for alpha, beta in form.lines),
        points=tuple((size, _short(time)) for size, time in form.points),
        least_bytes=int(size_bytes[0]),
        most_bytes=int(size_bytes[-1]),
        kind="fitted" if form.lines else "measured",
        source=f"{source}; {len(series)} points, mean error {error:.1%}{unseen}",
    )
    return FittedCurve(curve, len(series), error, left_out)


def _short(number: float) -> float:
    """Six digits: the data have four."""
    return float(f"{number:.{_DIGITS}g}")


@dataclass(frozen=True)
class CalibratedCluster:
    """The profile with its new curves, and how each of them was come to."""

    cluster: Cluster
    fitted: tuple[FittedCurve, ...]


def calibrated(
    cluster: Cluster, points: Sequence[CollectivePoint], name: str, source: str, today: date
) -> CalibratedCluster:
    """The cluster under a new name, with a curve for each series of points beside its others.

    Args:
        source: what the points are called in the curves' source: a file's name.

    Raises:
        CollectiveTableError: a series has one size, or more ranks a node than the cluster has.
    """
    gpus = cluster.count("gpus_per_node")
    for point in points:
        if point.ranks_per_node > gpus:
            raise CollectiveTableError(
                f"{source} has {point.ranks_per_node} ranks on one node, and a node of cluster "
                f"'{cluster.name}' has {gpus} GPUs: give the profile of the cluster it was "
                "measured on"
            )
    of_gpu = f" on {points[0].gpu}" if points and points[0].gpu else ""
    fitted = fit_curves(points, f"{source}{of_gpu}, calibrated {today.isoformat()}")
    replaced = {one.curve.key for one in fitted}
    kept = tuple(curve for curve in cluster.curves if curve.key not in replaced)
    curves = (*kept, *(one.curve for one in fitted))
    return CalibratedCluster(cluster.model_copy(update={"name": name, "curves": curves}), fitted)
