"""The errors of curves on sizes that they were not made of: every second size is withheld."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from twinstream.hardware_profiles.clusters.curves import MOST_LINES, Collective
from twinstream.hardware_profiles.collectives.fitting import (
    arrays,
    by_series,
    fit_form,
    form_of,
)
from twinstream.hardware_profiles.collectives.reading import CollectivePoint


@dataclass(frozen=True)
class WithheldErrors:
    """Errors of one GPU type's curves of a collective and number of ranks, over its dtypes.

    Each a mean of |predicted / measured - 1|. `lines_error`: the least of up to three lines, on
    the points that it was fitted to. `error`: the curve that is chosen, likewise (0 of a table).
    `withheld_error`: a curve made of every second size, beginning with the smallest, on the others.
    """

    gpu: str
    collective: Collective
    ranks: int
    num_points: int
    lines_error: float
    error: float
    num_withheld: int
    withheld_error: float


def errors_of(points: Iterable[CollectivePoint]) -> tuple[WithheldErrors, ...]:
    """Errors by GPU type, collective and ranks, in that order; dtypes have curves of their own.

    Series of under four sizes are left out: with every second withheld, a curve has one at most.
    """
    groups: dict[tuple[str, Collective, int], list[list[CollectivePoint]]] = {}
    points = tuple(points)
    for gpu in sorted({point.gpu for point in points}):
        of_gpu = [point for point in points if point.gpu == gpu]
        for (collective, ranks, _, _), series in by_series(of_gpu).items():
            if len({point.size_bytes for point in series}) >= 4:
                groups.setdefault((gpu, collective, ranks), []).append(series)
    return tuple(_errors(key, groups[key]) for key in sorted(groups))


def mean_by_gpu(errors: Sequence[WithheldErrors], ranks: int) -> dict[str, tuple[float, float]]:
    """Return the means of `lines_error` and `withheld_error` by GPU type, at a number of ranks."""
    found = {}
    for gpu in sorted({one.gpu for one in errors if one.ranks == ranks}):
        mine = [one for one in errors if one.gpu == gpu and one.ranks == ranks]
        lines = sum(one.lines_error * one.num_points for one in mine)
        withheld = sum(one.withheld_error * one.num_withheld for one in mine)
        found[gpu] = (
            lines / sum(one.num_points for one in mine),
            withheld / sum(one.num_withheld for one in mine),
        )
    return found


def _errors(
    key: tuple[str, Collective, int], dtypes: Sequence[Sequence[CollectivePoint]]
) -> WithheldErrors:
    lines, own, withheld = [], [], []
    for series in dtypes:
        size_bytes, time_ns = arrays(series)
        lines.append(
            form_of(f"lines {MOST_LINES}", size_bytes, time_ns).errors(size_bytes, time_ns)
        )
        own.append(fit_form(size_bytes, time_ns)[0].errors(size_bytes, time_ns))
        kept = np.isin(size_bytes, np.unique(size_bytes)[::2])
        form, _ = fit_form(size_bytes[kept], time_ns[kept])
        withheld.append(form.errors(size_bytes[~kept], time_ns[~kept]))
    every, unseen = np.concatenate(lines), np.concatenate(withheld)
    return WithheldErrors(
        *key,
        num_points=len(every),
        lines_error=float(every.mean()),
        error=float(np.concatenate(own).mean()),
        num_withheld=len(unseen),
        withheld_error=float(unseen.mean()),
    )
