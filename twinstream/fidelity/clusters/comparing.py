"""Speeds held against each other: scaling from fewest GPUs, ways to run the same, ZeRO-3 and PTD.

What is compared is tokens/s per GPU, relative to the row of the lowest rank in the set.
"""

from collections.abc import Sequence

from twinstream.fidelity.clusters.scoring import ScoredRow
from twinstream.schedule.node import Node


class SpeedComparison(Node):
    """How much faster a row is than the base of its set, as measured and as predicted.

    `points` is the difference of the two in percent of the base's speed; `ratio_error` the error of
    the predicted ratio, a fraction.
    """

    kind: str
    set: str
    base: str
    row: str
    num_gpus: int
    measured: float
    predicted: float

    @property
    def points(self) -> float:
        """Predicted less measured, in points."""
        return (self.predicted - self.measured) * 100

    @property
    def ratio_error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured - 1


def comparisons(rows: Sequence[ScoredRow]) -> tuple[SpeedComparison, ...]:
    """Every row of a set but its base, sets in order of first appearance."""
    sets: dict[tuple[str, str], list[tuple[int, ScoredRow]]] = {}
    for each in rows:
        one = each.row.compared
        if each.error is not None and one is not None:
            sets.setdefault((one.kind, one.set), []).append((one.rank, each))
    found = []
    for (kind, name), members in sets.items():
        members.sort(key=lambda member: member[0])
        base = members[0][1]
        found += [_against(kind, name, base, each) for rank, each in members if each is not base]
    return tuple(found)


def _against(kind: str, name: str, base: ScoredRow, row: ScoredRow) -> SpeedComparison:
    return SpeedComparison(
        kind=kind,
        set=name,
        base=base.row.row_id,
        row=row.row.row_id,
        num_gpus=row.row.num_gpus,
        measured=_speed(row, row.row.measured_s) / _speed(base, base.row.measured_s),
        predicted=_speed(row, row.predicted.step_s) / _speed(base, base.predicted.step_s),
    )


def _speed(each: ScoredRow, step_s: float | None) -> float:
    assert step_s is not None, "only rows with an error are compared"
    return each.row.tokens / step_s / each.row.num_gpus
