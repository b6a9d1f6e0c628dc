"""Points to curves: how many lines, or a table, by the error on sizes that were left out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twinstream.hardware_profiles.clusters.curves import (
    MOST_LINES,
    Collective,
    CollectiveCurve,
    interpolated,
)
from twinstream.hardware_profiles.collectives.line_fit import Floats, Line, fit_lines, least_of
from twinstream.hardware_profiles.collectives.points import CollectivePoint
from twinstream.hardware_profiles.errors import CollectiveTableError

LEAST_SIZES = 2
_US = 1e3
_DIGITS = 6
_CLEARLY = 0.75

Series = tuple[Collective, int, int, str]  # collective, ranks, ranks per node, dtype


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
    if len(np.unique(size_bytes)) < LEAST_SIZES:
        raise CollectiveTableError(
            f"{collective} of {ranks} ranks has {len(np.unique(size_bytes))} size; a curve needs "
            f"{LEAST_SIZES} or more"
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
