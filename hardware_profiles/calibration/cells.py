"""Choose the rows of a table that calibrate, before any measured figure is seen.

Candidates are chosen by configuration: of models and lengths spread over the table's, the runs
with the smallest caps, the largest, the smallest device cap with the largest host cap, where the
link is busiest, and the smallest host cap, where the most is computed again: only runs that differ
in that tell attention's forward rate from its backward rate. Four pairs of smallest and largest
caps, at lengths from the shortest to the longest and every model in turn, are taken at once; runs
of one model by two policies of ours count as of two models. The rest are those candidates that tell
the most of all parameters together, by how predictions change with each (D-optimal).
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from twinstream.hardware_profiles.calibration.search import noise_covariance
from twinstream.hardware_profiles.calibration.trials import Vector
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.measured_table import MeasuredRow

MOST_CELLS = 14
MOST_CANDIDATES = 42
_FIRST_PAIRS = 4


_Item = TypeVar("_Item")


def candidate_cells(
    rows: Iterable[MeasuredRow], most: int = MOST_CANDIDATES
) -> tuple[MeasuredRow, ...]:
    """The successful rows to choose from, about `most`; the first of them are taken at once.

    Raises:
        CalibrationError: no row succeeded.
    """
    by_sweep: dict[tuple[int, str], list[MeasuredRow]] = {}
    for row in rows:
        if row.status == "ok":
            by_sweep.setdefault((row.seq_len, row.planned_model), []).append(row)
    if not by_sweep:
        raise CalibrationError("the table has no successful row to calibrate with")
    chosen = {id(row): row for row in _first(by_sweep)}
    sweeps = sorted(by_sweep)
    for sweep in _spread(sweeps, min(len(sweeps), most // 3)):
        found = by_sweep[sweep]
        busiest = min(found, key=lambda row: (row.dev_mem_gib, -row.host_mem_gib))
        leanest = min(found, key=lambda row: (row.host_mem_gib, row.dev_mem_gib))
        for row in (*_pair(found), busiest, leanest):
            chosen[id(row)] = row
    return tuple(chosen.values())


def informative_cells(
    candidates: Sequence[MeasuredRow], effects: Vector, most: int = MOST_CELLS
) -> tuple[MeasuredRow, ...]:
    """The candidates that calibrate, at most `most`.

    Args:
        candidates: of `candidate_cells`.
        effects: [candidates, parameters], how far the log of a predicted time moves when a
            parameter moves by its prior's width.
    """
    by_sweep: dict[tuple[int, str], list[MeasuredRow]] = {}
    for row in candidates:
        by_sweep.setdefault((row.seq_len, row.planned_model), []).append(row)
    first = {id(row) for row in _first(by_sweep)}
    chosen = [i for i, row in enumerate(candidates) if id(row) in first][:most]
    while len(chosen) < min(most, len(candidates)):
        left = [i for i in range(len(candidates)) if i not in chosen]
        chosen.append(max(left, key=lambda i: _information_gain([*chosen, i], candidates, effects)))
    return tuple(candidates[i] for i in chosen)


def sweep_of(row: MeasuredRow) -> str:
    """Return the name of the sweep that a run was measured in: its model and length."""
    return f"{row.model} {row.seq_len}"


def _information_gain(
    chosen: Sequence[int], candidates: Sequence[MeasuredRow], effects: Vector
) -> float:
    """Logarithm of how much narrower than the priors these rows make the parameters, together."""
    sweeps = tuple(sweep_of(candidates[i]) for i in chosen)
    seen, noise = effects[list(chosen)], noise_covariance(sweeps, np.ones(len(chosen)))
    information = seen.T @ np.linalg.solve(noise, seen)
    # D-optimal: ln det(I + E^T N^-1 E), where E are effects of the priors' widths.
    return float(np.linalg.slogdet(np.eye(effects.shape[1]) + information)[1])


def _first(by_sweep: dict[tuple[int, str], list[MeasuredRow]]) -> list[MeasuredRow]:
    """Pairs at lengths from the shortest to the longest, of one model after the other."""
    models = sorted({model for _, model in by_sweep})
    models.sort(key=lambda name: -sum(len(by_sweep[s]) for s in by_sweep if s[1] == name))
    num_pairs = min(max(_FIRST_PAIRS, len(models)), MOST_CELLS // 2, len(by_sweep))
    chosen: dict[int, MeasuredRow] = {}
    for number in range(num_pairs):
        model = models[number % len(models)]
        lengths = sorted(length for length, name in by_sweep if name == model)
        place = number / max(1, num_pairs - 1) * (len(lengths) - 1)
        for row in _pair(by_sweep[lengths[round(place)], model]):
            chosen[id(row)] = row
    return list(chosen.values())


def _pair(rows: Sequence[MeasuredRow]) -> tuple[MeasuredRow, MeasuredRow]:
    """The smallest and the largest caps, of the device first."""
    return min(rows, key=_caps), max(rows, key=_caps)


def _caps(row: MeasuredRow) -> tuple[float, float]:
    return row.dev_mem_gib, row.host_mem_gib


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    if count == 1:
        return [items[len(items) // 2]]
    last = len(items) - 1
    return [items[round(i * last / (count - 1))] for i in range(count)]
