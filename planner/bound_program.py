"""The linear program of the lower bound, assembled column by column.

Units inside: GiB and ms, so that coefficients stay near one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

Terms = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Solution:
    """Column values, the safe dual objective, and the duals by row and by column bound."""

    values: NDArray[np.float64]
    dual_objective: float
    row_prices: NDArray[np.float64]
    upper_prices: NDArray[np.float64]


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

    def matrix(self, num_columns: int) -> csr_matrix:
        shape = (len(self.right), num_columns)
        return csr_matrix((self.data, (self.row, self.column)), shape=shape)


class Program:
    """Minimise a sum of columns subject to linear rows; every column is bounded on both sides."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._at_most = _Rows()
        self._equal = _Rows()

    @contextmanager
    def extended(self) -> Iterator[None]:
        """What is added inside is forgotten at the end."""
        num_columns = len(self._upper)
        kept = [(rows, len(rows.right), len(rows.data)) for rows in (self._at_most, self._equal)]
        try:
            yield
        finally:
            del self._lower[num_columns:], self._upper[num_columns:]
            for rows, num_rows, num_terms in kept:
                rows.truncate(num_rows, num_terms)

    def column(self, upper: float = 1.0, lower: float = 0.0) -> int:
        """A new column in [lower, upper]."""
        self._lower.append(lower)
        self._upper.append(upper)
        return len(self._upper) - 1

    def at_most(self, terms: Terms, right: float) -> int:
        return self._at_most.add(terms, right)

    def equal(self, terms: Terms, right: float) -> int:
        return self._equal.add(terms, right)

    def minimise(self, costs: Mapping[int, float]) -> Solution | None:
        """The optimum of the sum of cost x column, or None when no values satisfy the rows."""
        num_columns = len(self._upper)
        cost = np.zeros(num_columns)
        for column, value in costs.items():
            cost[column] = value
        rows, equal = self._at_most.matrix(num_columns), self._equal.matrix(num_columns)
        lower, upper = np.asarray(self._lower), np.asarray(self._upper)
        # scipy takes sparse rows; its stubs do not say so.
        found = linprog(  # type: ignore[call-overload]
            cost,
            A_ub=rows,
            b_ub=self._at_most.right,
            A_eq=equal if self._equal.right else None,
            b_eq=self._equal.right or None,
            bounds=np.stack([lower, upper], axis=1),
            method="highs-ds",
        )
        if found.status == 2:
            return None
        assert found.status == 0, found.message
        prices = np.minimum(found.ineqlin.marginals, 0.0)
        equal_prices = np.asarray(found.eqlin.marginals) if self._equal.right else np.zeros(0)
        reduced = cost - rows.T @ prices
        objective = float(prices @ np.asarray(self._at_most.right))
        if self._equal.right:
            reduced = reduced - equal.T @ equal_prices
            objective += float(equal_prices @ np.asarray(self._equal.right))
        # Weak duality: any prices of the right sign bound the optimum from below, with each
        # column at the end of its range where its reduced cost is least.
        objective += float(np.minimum(reduced, 0.0) @ upper + np.maximum(reduced, 0.0) @ lower)
        return Solution(found.x, objective, prices, np.asarray(found.upper.marginals))
