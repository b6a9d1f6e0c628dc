"""Rows of the bound's linear program for host memory, left out where they cannot matter."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.bound.gap_columns import ChainGaps, Terms
from twinstream.planner.bound.interval_columns import Interval
from twinstream.planner.bound.program import LinearProgram

Stretch = tuple[int, int, Terms]  # from one segment to another; what is there by column


@dataclass(frozen=True)
class Cap:
    """The cap of a memory in GiB: a number, or a column of the program where the cap is sought."""

    column: int | None = None
    gib: float = 0.0

    def above(self, program: LinearProgram, terms: Terms, used_gib: float = 0.0) -> int:
        """A row: the terms and what is used come to no more than the cap."""
        left = [] if self.column is None else [(self.column, -1.0)]
        return program.at_most([*terms, *left], self.gib - used_gib)


class HostRows:
    """Rows that keep the host within its cap, and both memories together within theirs.

    They are as many as all others: solving without them, where all fits, takes half the time.

    Args:
        program: to which they are added.
        gaps: of the chain.
        intervals: of its segments.
        used_gib: what each segment itself must have on the device.
        all_gib: of all tensors, and more.
    """

    def __init__(
        self,
        program: LinearProgram,
        gaps: ChainGaps,
        intervals: Sequence[Interval],
        used_gib: Sequence[float],
        all_gib: float,
    ) -> None:
        self._program, self._gaps, self._intervals = program, gaps, intervals
        self._used_gib, self._all_gib = used_gib, all_gib

    def may_be_left_out(self, cap: Cap | None) -> bool:
        """Return whether the host has room for all that could be there at once."""
        return not self._gaps.tied and cap is not None and self._most_gib <= cap.gib

    def add(
        self, kept: Sequence[int], device_cap: Cap | None, host_cap: Cap | None
    ) -> tuple[list[int], list[int]]:
        """Rows of the host, and of both memories; `kept` are columns, GiB kept at each segment."""
        if host_cap is None:
            return [], []
        if self._gaps.tied:
            homes = [*self._gaps.home_gib(), *self._gaps.updates.homes]
            return [host_cap.above(self._program, homes)], []
        host = self._host_rows(host_cap)
        if device_cap is None:
            return host, []
        column = host_cap.column if device_cap.column is None else device_cap.column
        return host, self._rows_of_both(kept, Cap(column, device_cap.gib + host_cap.gib))

    def _host_rows(self, cap: Cap) -> list[int]:
        """At every task: what the host holds, but for what is loaded early or not yet stored."""
        held = self._occupied(self._gaps.host_at)
        # held - ahead - behind <= host cap, in GiB at each task: what was loaded early is counted
        # as held, and so is what still waits for its copy, and neither needs to be on the host
        return [
            cap.above(
                self._program, [(column, 1.0), (interval.ahead, -1.0), (interval.behind, -1.0)]
            )
            for column, interval in zip(held, self._intervals, strict=True)
        ]

    def _rows_of_both(self, kept: Sequence[int], cap: Cap) -> list[int]:
        """At every task: what is not made again is somewhere, on the device or on the host."""
        loaded = self._occupied(self._gaps.loaded_at)
        # operands + kept + loaded later <= device cap + host cap, in GiB at each task
        return [
            cap.above(self._program, [(one, 1.0), (other, 1.0)], used)
            for one, other, used in zip(kept, loaded, self._used_gib, strict=True)
        ]

    def _occupied(self, stretches: Sequence[Stretch]) -> list[int]:
        return self._program.occupancy(stretches, len(self._intervals), self._all_gib)

    def _at(self, stretches: Sequence[Stretch], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """GiB at every segment."""
        change = np.zeros(len(self._intervals) + 1)
        for low, high, terms in stretches:
            gib = sum(float(values[column]) * share for column, share in terms)
            change[low] += gib
            change[high] -= gib
        return np.cumsum(change)[:-1]

    @cached_property
    def _most_gib(self) -> float:
        """On the host at once, if everything went there."""
        there = [  # with nothing on a disk
            (low, high, [(column, gib) for column, gib in terms if gib > 0.0])
            for low, high, terms in self._gaps.host_at
        ]
        columns = [c for _, _, terms in there for c, _ in terms]
        all_there = np.ones(1 + max(columns, default=0))
        return float(self._at(there, all_there).max(initial=0.0))
