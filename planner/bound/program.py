"""A linear program that is assembled column by column, and solved by HiGHS.

The lower bound uses it. Units inside are GiB and ms, so that coefficients are near one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_matrix, vstack

Terms = Sequence[tuple[int, float]]
_INFEASIBLE = (
    highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible,
)  # fmt: skip
_DECIDED = (*_INFEASIBLE, highspy.HighsModelStatus.kOptimal)
_LARGE_ROWS = 15_000  # from there on interior points and a crossover take less than the simplex


@dataclass(frozen=True)
class Basis:
    """The basis of an optimum, from which a program of the same size is solved quickly."""

    size: tuple[int, int, int]  # columns, rows that are at most, rows that are equal
    statuses: highspy.HighsBasis


@dataclass(frozen=True)
class Solution:
    """An optimum: column values, the safe dual objective, the duals of at-most rows, the basis."""

    values: NDArray[np.float64]
    dual_objective: float
    row_prices: NDArray[np.float64]
    basis: Basis


@dataclass
class _Rows:
    data: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, terms: Terms, right: float) -> int:
        number = len(self.right)
        for column, coefficient in terms:
            if coefficient:
                self.row.append(number)
                self.column.append(column)
                self.data.append(coefficient)
        self.right.append(right)
        return number

    def truncate(self, num_rows: int, num_terms: int) -> None:
        """Forget all but the first rows, which have so many terms."""
        del self.right[num_rows:]
        for terms in (self.data, self.row, self.column):
            del terms[num_terms:]

    def matrix(self, num_columns: int) -> csc_matrix:
        shape = (len(self.right), num_columns)
        return csc_matrix((self.data, (self.row, self.column)), shape=shape)


class LinearProgram:
    """Minimise a sum of columns subject to linear rows; every column is bounded on both sides."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._at_most = _Rows()
        self._equal = _Rows()

    @contextmanager
    def extended(self) -> Iterator[None]:
        """Forget at the end of this context what was added in it."""
        num_columns = len(self._upper)
        kept = [(rows, len(rows.right), len(rows.data)) for rows in (self._at_most, self._equal)]
        try:
            yield
        finally:
            del self._lower[num_columns:], self._upper[num_columns:]
            for rows, num_rows, num_terms in kept:
                rows.truncate(num_rows, num_terms)

    def column(self, upper: float = 1.0, lower: float = 0.0) -> int:
        """Add a column in [lower, upper] and return its number."""
        self._lower.append(lower)
        self._upper.append(upper)
        return len(self._upper) - 1

    def at_most(self, terms: Terms, right: float) -> int:
        return self._at_most.add(terms, right)

    def equal(self, terms: Terms, right: float) -> int:
        return self._equal.add(terms, right)

    def occupancy(
        self, stretches: Sequence[tuple[int, int, Terms]], count: int, upper: float
    ) -> list[int]:
        """A column per segment for what is there at it: a recurrence, so that rows stay short.

        Args:
            stretches: (first segment, the one after the last, what is there by column).
            count: of segments.
            upper: the most that may be there.
        """
        change: list[dict[int, float]] = [{} for _ in range(count + 1)]
        for low, high, terms in stretches:
            for column, coefficient in terms:
                change[low][column] = change[low].get(column, 0.0) + coefficient
                change[high][column] = change[high].get(column, 0.0) - coefficient
        columns: list[int] = []
        for segment in range(count):
            columns.append(self.column(upper=upper))
            # there = there at the segment before + what begins here - what ended before
            row = [(columns[-1], 1.0), *((c, -value) for c, value in change[segment].items())]
            if segment:
                row.append((columns[-2], -1.0))
            self.equal(row, 0.0)
        return columns

    def minimise(self, costs: Mapping[int, float], start: Basis | None = None) -> Solution | None:
        """The optimum of the sum of cost x column, or None when no values satisfy the rows.

        Args:
            costs: by column.
            start: of another optimum; that of a program of another size is of no use. Of several
                optima it may lead to another one.
        """
        num_columns = len(self._upper)
        cost = np.zeros(num_columns)
        for column, value in costs.items():
            cost[column] = value
        size = num_columns, len(self._at_most.right), len(self._equal.right)
        rows, equal = self._at_most.matrix(num_columns), self._equal.matrix(num_columns)
        solver = _solver()
        solver.passModel(self._model(cost, vstack([rows, equal], format="csc")))
        if start is not None and start.size == size:
            solver.setBasis(start.statuses)
        elif size[1] + size[2] > _LARGE_ROWS:
            solver.setOptionValue("solver", "ipm")
        solver.solve()
        status = solver.getModelStatus()
        if start is not None and status != highspy.HighsModelStatus.kOptimal:
            return self.minimise(costs)
        if status not in _DECIDED:  # by interior points
            solver.setOptionValue("solver", "simplex")
            solver.solve()
            status = solver.getModelStatus()
        if status in _INFEASIBLE:
            return None
        assert status == highspy.HighsModelStatus.kOptimal, solver.modelStatusToString(status)
        found = solver.getSolution()
        duals = np.asarray(found.row_dual)
        # HiGHS may return prices of the wrong sign, within its tolerance: those count 0
        prices, equal_prices = np.minimum(duals[: size[1]], 0.0), duals[size[1] :]
        reduced = cost - rows.T @ prices - equal.T @ equal_prices
        objective = float(prices @ np.asarray(self._at_most.right))
        objective += float(equal_prices @ np.asarray(self._equal.right))
        # Weak duality: any prices of the right sign bound the optimum from below, with each
        # column at the end of its range where its reduced cost is least.
        lower, upper = np.asarray(self._lower), np.asarray(self._upper)
        objective += float(np.minimum(reduced, 0.0) @ upper + np.maximum(reduced, 0.0) @ lower)
        basis = Basis(size, solver.getBasis())
        return Solution(np.asarray(found.col_value), objective, prices, basis)

    def _model(self, cost: NDArray[np.float64], matrix: csc_matrix) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_row_, model.num_col_ = matrix.shape
        model.col_cost_ = cost
        model.col_lower_, model.col_upper_ = np.asarray(self._lower), np.asarray(self._upper)
        equal = np.asarray(self._equal.right)
        free = np.full(len(self._at_most.right), -highspy.kHighsInf)
        model.row_lower_ = np.concatenate([free, equal])
        model.row_upper_ = np.concatenate([np.asarray(self._at_most.right), equal])
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = matrix.indptr
        model.a_matrix_.index_ = matrix.indices
        model.a_matrix_.value_ = matrix.data
        return model


class _Silent(highspy.Highs):
    """A solver that prints nothing: from 1.16 on its banner comes as callbacks are enabled."""

    def enableCallbacks(self) -> None:  # noqa: N802
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def _solver() -> highspy.Highs:
    solver = _Silent()  # type: ignore[no-untyped-call]
    solver.setOptionValue("solver", "simplex")
    return solver
