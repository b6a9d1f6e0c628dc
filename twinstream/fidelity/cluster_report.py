"""Predicted steps of clusters held against published ones: by series, and speeds beside speeds."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from pydantic import computed_field
from rich.console import Group, RenderableType

from twinstream.fidelity.cluster_rows import ClusterRow
from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.scoring import Key, Report, ScoredRow, errors_of, grouped, score, table_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.published_steps import NearSteps, PublishedSteps, StepKind
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.screens.fitted_table import FittedTable

_KINDS = {
    "scaling": "Scaling: tokens/s per GPU relative to the run on fewest GPUs",
    "ratio": "Ratios: tokens/s per GPU relative to the first of a set",
    "zero3": "ZeRO-3 relative to PTD on as many GPUs",
}
Scored = ScoredRow[ClusterRow]


class NothingScoredError(TwinstreamError):
    """No row of the tables can be predicted."""


class SpeedComparison(Node):
    """A row's speed beside that of the base of its set, as measured and as predicted.

    What is compared is tokens/s per GPU, relative to the row of the lowest rank in the set.
    """

    kind: str
    set: str
    base: str
    row: str
    num_gpus: int
    measured: float
    predicted: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def points(self) -> float:
        """Return predicted less measured, in percent of the base's speed."""
        return (self.predicted - self.measured) * 100

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratio_error(self) -> float:
        """Return the error of the predicted ratio, a fraction."""
        return self.predicted / self.measured - 1


def score_steps(
    rows: Sequence[ClusterRow],
    *,
    jobs: int | None = None,
    on_start: Callable[[int], Callable[[], None]] = lambda total: lambda: None,
) -> tuple[Scored, ...]:
    """Predict published steps on the shipped profiles of their clusters.

    Raises:
        NothingScoredError: no row could be predicted.
    """
    keys = [Key(id(row), id(row)) if row.job else Predicted(refused=row.why_not) for row in rows]
    found = score(rows, keys, lambda row: None, jobs=jobs, on_start=on_start)
    return required(found)


def required(rows: tuple[Scored, ...]) -> tuple[Scored, ...]:
    """Return the rows where one has an error.

    Raises:
        NothingScoredError: none has.
    """
    if all(each.error is None for each in rows):
        why = next((each.row.why_not or each.predicted.refused for each in rows), "")
        raise NothingScoredError(f"none of {len(rows)} rows can be predicted; the first: {why}")
    return rows


class Bars:
    """The bar of each row's prediction, as a question would be told it if nobody had run the row.

    It is made of published steps on the same GPU (`PublishedSteps.near`) without those of the row's
    own family; the bias that is taken off is that of its publisher's.
    """

    def __init__(self, rows: Sequence[Scored]) -> None:
        published = PublishedSteps()
        machines: dict[str, Machine] = {}
        self._near: dict[int, NearSteps] = {}
        for each in rows:
            row = each.row
            if each.error is None or row.job is None:
                continue
            if row.cluster not in machines:
                machines[row.cluster] = machine_of(load_cluster(row.cluster))
            near = published.near(
                StepKind.of(row.job), machines[row.cluster], series=row.series, without=row.family
            )
            if near is not None:
                self._near[id(each)] = near

    def told(self, each: Scored) -> dict[str, object]:
        """Return a row's known bias and its bar, fractions of the time, by column."""
        near = self._near.get(id(each))
        return {"bias": None if near is None else near.bias, "bar": near and near.bar}

    def bar(self, each: Scored) -> float | None:
        """Return a row's bar, a fraction of the time; None where nothing is near."""
        near = self._near.get(id(each))
        return None if near is None else near.bar

    def coverage(self, rows: Iterable[Scored]) -> dict[str, Any]:
        """Return how many rows have a bar, and the shares that are within one and two of it."""
        off = [
            abs(each.error - near.bias) / near.bar
            for each in rows
            if each.error is not None and (near := self._near.get(id(each))) is not None
        ]
        shares = {
            name: fmean(one <= bars for one in off) if off else None
            for name, bars in (("within_bar", 1), ("within_two_bars", 2))
        }
        return {"with_bar": len(off), **shares}


def series_errors(rows: Sequence[Scored], bars: Bars | None = None) -> list[dict[str, Any]]:
    """Sum up the errors of each series, in order of first appearance.

    `rows` counts those scored, `mean_error` is of absolute errors, `bias` of signed ones, `worst`
    the largest; `with_bar` of them have an error bar, and `within_bar`, `within_two_bars` are the
    shares of those that are off by no more. The `all_` ones take the rows that constants were
    fitted to as well. `drift` is over runs of one configuration on fewest and most GPUs, the
    difference of their errors: the mean of the absolute ones over `families`, and the worst.
    """
    series = grouped(rows, lambda row: row.series)
    bars = bars or Bars(rows)
    return [{"series": name, **_errors(group, bars)} for name, group in series.items()]


def _errors(rows: Sequence[Scored], bars: Bars) -> dict[str, Any]:
    counted = [each for each in rows if each.row.split != "not scored"]
    unseen = errors_of(each for each in counted if each.row.split == "scored")
    every, drifts = errors_of(counted), list(_drifts(counted))
    return {
        **{"rows": unseen.count, "mean_error": unseen.mean_error},
        **{"bias": unseen.bias, "worst": unseen.worst},
        **{"all_rows": every.count, "all_mean_error": every.mean_error, "all_bias": every.bias},
        **bars.coverage(each for each in counted if each.row.split == "scored"),
        "families": len(drifts),
        "mean_drift": fmean(map(abs, drifts)) if drifts else None,
        "worst_drift": max(drifts, key=abs, default=None),
        "do_not_fit": sum(each.predicted.fits is False for each in rows),
        "not_modelled": sum(each.predicted.step_s is None for each in rows),
    }


def _drifts(rows: Sequence[Scored]) -> Iterator[float]:
    """Yield the error on most GPUs less that on fewest, of configurations run on several sizes."""
    known = [each for each in rows if each.error is not None]
    for runs in grouped(known, lambda row: row.family).values():
        ends = sorted(runs, key=lambda each: each.row.num_gpus)
        first, last = ends[0], ends[-1]
        if first.row.num_gpus < last.row.num_gpus:
            yield (last.error or 0.0) - (first.error or 0.0)


def comparisons(rows: Sequence[Scored]) -> tuple[SpeedComparison, ...]:
    """Compare every row of a set with its base, sets in order of first appearance."""
    sets: dict[tuple[str, str], list[tuple[int, Scored]]] = {}
    for each in rows:
        one = each.row.compared
        if each.error is not None and one is not None:
            sets.setdefault((one.kind, one.set), []).append((one.rank, each))
    found = []
    for (kind, name), members in sets.items():
        base, *others = [each for _, each in sorted(members, key=lambda member: member[0])]
        found += [
            SpeedComparison(
                kind=kind,
                set=name,
                base=base.row.row_id,
                row=each.row.row_id,
                num_gpus=each.row.num_gpus,
                measured=_speed(each, each.row.measured_s) / _speed(base, base.row.measured_s),
                predicted=_speed(each, each.predicted.step_s) / _speed(base, base.predicted.step_s),
            )
            for each in others
        ]
    return tuple(found)


def _speed(each: Scored, step_s: float | None) -> float:
    assert step_s is not None, "only rows with an error are compared"
    return each.row.tokens / step_s / each.row.num_gpus


class ClusterReport(Report[ClusterRow]):
    """Row by row, then by series, then speeds held against each other, then what does not fit."""

    def __init__(self, rows: Sequence[Scored]) -> None:
        self.rows, self._bars = rows, Bars(rows)

    def told(self, each: Scored) -> dict[str, object]:
        """Return what is published and predicted of a step."""
        row, found = each.row, each.predicted
        return {
            "series": row.series,
            "row": row.row_id,
            "split": row.split,
            "gpu": row.gpu,
            "gpus": row.num_gpus,
            "layout": row.layout,
            "measured_s": row.measured_s,
            "predicted_s": found.step_s,
            "error": each.error,
            "fits": found.fits,
            "memory_bytes": found.memory_bytes,
            "room_bytes": found.room_bytes,
            "reserved_bytes": row.reserved_bytes,
            "activation_bytes": found.activation_bytes,
            "suspect": row.suspect,
            "why_not": row.why_not or found.refused,
            "note": row.note,
            **self._bars.told(each),
        }

    def screen(self) -> Group:
        """Return a table each, then how many rows are not predicted and why."""
        found = comparisons(self.rows)
        parts: list[RenderableType] = [self._rows_table(), self._series_table()]
        for kind, title in _KINDS.items():
            if some := [one for one in found if one.kind == kind]:
                parts.append(Group(title, _comparison_table(some)))
        if self._activations():
            parts.append(Group("Activations of the first stage", self._activation_table()))
        reasons = Counter(each.row.why_not or each.predicted.refused for each in self.rows)
        return Group(*parts, *(f"{count} rows: {why}." for why, count in reasons.items() if why))

    def json(self) -> dict[str, object]:
        """Return series, comparisons, activations and rows."""
        return {
            "series": series_errors(self.rows, self._bars),
            "comparisons": [one.model_dump() for one in comparisons(self.rows)],
            "activations": [
                {"row": row.row_id, "published_bytes": published, "predicted_bytes": predicted}
                for row, published, predicted in self._activations()
            ],
            "rows": list(map(self.told, self.rows)),
        }

    def _activations(self) -> list[tuple[ClusterRow, int, int]]:
        """Rows whose activations are published and predicted, with both."""
        return [
            (each.row, each.row.activation_bytes, each.predicted.activation_bytes)
            for each in self.rows
            if each.row.activation_bytes is not None and each.predicted.activation_bytes is not None
        ]

    def _rows_table(self) -> Group:
        table = table_of(("row", "layout"), ("GPUs", "measured s", "predicted s", "error", "fits"))
        predicted = [each for each in self.rows if each.predicted.step_s is not None]
        for series, rows in groupby(predicted, lambda each: each.row.series):
            table.add_section()
            table.add_row(f"[{series}]")
            for each in rows:
                mark = {"calibration": " *", "not scored": " -", "scored": ""}[each.row.split]
                table.add_row(
                    each.row.row_id + mark,
                    each.row.layout,
                    f"{each.row.num_gpus:,}",
                    _seconds(each.row.measured_s),
                    _seconds(each.predicted.step_s),
                    _percent(each.error),
                    {True: "yes", False: "NO", None: "-"}[each.predicted.fits],
                )
        told = "* constants were fitted to it; - not scored. Error: predicted / measured - 1."
        return Group("Rows", table, told)

    def _series_table(self) -> Group:
        names = (
            *("rows", "mean", "bias", "worst", "in 1 bar", "in 2"),
            *("all", "drift", "most", "unfit"),
        )
        lines = [
            (
                one["series"],
                f"{one['rows']} of {one['all_rows']}",
                _percent(one["mean_error"], signed=False),
                _percent(one["bias"]),
                _percent(one["worst"]),
                _percent(one["within_bar"], signed=False),
                _percent(one["within_two_bars"], signed=False),
                _percent(one["all_mean_error"], signed=False),
                _percent(one["mean_drift"], signed=False),
                _percent(one["worst_drift"]),
                str(one["do_not_fit"] or "-"),
            )
            for one in series_errors(self.rows, self._bars)
            if one["all_rows"]
        ]
        table = table_of(("series",), names, lines)
        table.columns[0].no_wrap = True
        told = (
            "Mean, bias and worst of rows that no constant was fitted to; all: mean with those. "
            "In 1 bar, in 2: how many are off by at most what is stated (a row's bar is of other "
            "configurations), the known bias of its publisher taken off; goals 60-80, 85-97 %. "
            "Drift: error on most GPUs less that on fewest, of one configuration, mean and most. "
            "Unfit: ran, and is predicted not to fit."
        )
        return Group("Errors of step times by series", table, told)

    def _activation_table(self) -> FittedTable:
        numbers = ("published GiB", "predicted GiB", "error")
        lines = [
            (
                row.row_id,
                row.layout,
                f"{published / 2**30:.2f}",
                f"{predicted / 2**30:.2f}",
                _percent(predicted / published - 1),
            )
            for row, published, predicted in self._activations()
        ]
        return table_of(("row", "layout"), numbers, lines)


def _comparison_table(found: Sequence[SpeedComparison]) -> FittedTable:
    numbers = ("GPUs", "measured", "predicted", "points", "ratio error")
    lines = [
        (
            one.set,
            one.row,
            f"{one.num_gpus:,}",
            f"{one.measured:.3f}",
            f"{one.predicted:.3f}",
            f"{one.points:+.1f}",
            _percent(one.ratio_error),
        )
        for one in found
    ]
    return table_of(("set", "row"), numbers, lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None, *, signed: bool = True) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"
