"""Every row of published tables predicted: errors by series, drift, scaling, ratios, what fits."""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from twinstream.fidelity.clusters.measured_steps import ClusterRow
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node

Split = Literal["scored", "calibration", "not scored"]


class NothingScoredError(TwinstreamError):
    """No row of the tables can be predicted."""


class Predicted(Node):
    """What is kept of a prediction; `refused` says why there is none."""

    step_s: float | None = None
    fits: bool | None = None
    memory_bytes: int | None = None
    activation_bytes: int | None = None
    refused: str = ""


class ScoredRow(Node):
    """A row and its prediction; `error` is predicted / measured - 1 of the step's time."""

    row: ClusterRow
    split: Split
    predicted: Predicted
    error: float | None = None


class SeriesErrors(Node):
    """Errors of one series' rows, as fractions; None where there are none.

    `rows` counts those scored, `mean_error` is of absolute errors, `bias` of signed ones, `worst`
    the largest. The `all_` ones take the rows that constants were fitted to as well. `drift` is
    over runs of one configuration on fewest and most GPUs, the difference of their errors: the mean
    of the absolute ones over `families`, and the worst.
    """

    series: str
    rows: int
    mean_error: float | None = None
    bias: float | None = None
    worst: float | None = None
    all_rows: int = 0
    all_mean_error: float | None = None
    all_bias: float | None = None
    families: int = 0
    mean_drift: float | None = None
    worst_drift: float | None = None
    do_not_fit: int = 0
    not_modelled: int = 0


class Validation(Node):
    """All rows in the tables' order, and errors by series in order of first appearance."""

    rows: tuple[ScoredRow, ...]
    series: tuple[SeriesErrors, ...]


def score(rows: Sequence[ClusterRow], predicted: Sequence[Predicted]) -> Validation:
    """Hold predictions against the rows they are of, in the same order.

    Raises:
        NothingScoredError: no row could be predicted.
    """
    scored = tuple(_scored(row, found) for row, found in zip(rows, predicted, strict=True))
    if all(each.error is None for each in scored):
        why = next((each.row.why_not or each.predicted.refused for each in scored), "")
        raise NothingScoredError(f"none of {len(scored)} rows can be predicted; the first: {why}")
    names = dict.fromkeys(each.row.series for each in scored)
    return Validation(
        rows=scored,
        series=tuple(
            _errors(name, [each for each in scored if each.row.series == name]) for name in names
        ),
    )


def _scored(row: ClusterRow, found: Predicted) -> ScoredRow:
    split: Split = "calibration" if row.calibrates else "scored"
    if not row.scored:
        split = "not scored"
    error = None
    if found.step_s is not None and row.measured_s is not None:
        error = found.step_s / row.measured_s - 1
    return ScoredRow(row=row, split=split, predicted=found, error=error)


def _errors(name: str, rows: Sequence[ScoredRow]) -> SeriesErrors:
    counted = [each for each in rows if each.split != "not scored" and each.error is not None]
    unseen = [each.error for each in counted if each.split == "scored" and each.error is not None]
    every = [each.error for each in counted if each.error is not None]
    drifts = _drifts(counted)
    return SeriesErrors(
        series=name,
        rows=len(unseen),
        mean_error=_mean([abs(error) for error in unseen]),
        bias=_mean(unseen),
        worst=max(unseen, key=abs, default=None),
        all_rows=len(every),
        all_mean_error=_mean([abs(error) for error in every]),
        all_bias=_mean(every),
        families=len(drifts),
        mean_drift=_mean([abs(drift) for drift in drifts]),
        worst_drift=max(drifts, key=abs, default=None),
        do_not_fit=sum(each.predicted.fits is False for each in rows),
        not_modelled=sum(each.predicted.step_s is None for each in rows),
    )


def _drifts(rows: Sequence[ScoredRow]) -> list[float]:
    """Of every configuration run on several sizes: error on most GPUs less that on fewest."""
    families: dict[str, list[ScoredRow]] = {}
    for each in rows:
        families.setdefault(each.row.family, []).append(each)
    found = []
    for runs in families.values():
        ends = sorted(runs, key=lambda each: each.row.num_gpus)
        first, last = ends[0], ends[-1]
        if first.row.num_gpus < last.row.num_gpus and None not in (first.error, last.error):
            found.append((last.error or 0.0) - (first.error or 0.0))
    return found


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
