"""Rows of the lower bound's program for host memory, left out where they cannot matter."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.bound.gap_columns import GIB, GapProgram, Terms, occupancy
from twinstream.planner.bound.program import Program
from twinstream.planner.bound.slot_columns import Slot

_PLENTY = 1.2
_NOTHING_GIB = 1e-6

Stretch = tuple[int, int, Terms]  # from one segment to another; what is there by column


class HostRows:
    """What the host holds at every task, and both memories together.

    Most programs have an optimum that keeps to these rows without being told. They are as many as
    all others: solving without them takes half the time.

    Args:
        program: to which they are added.
        gaps: of the chain.
        slots: of its segments.
        used_gib: what each segment itself must have on the device.
        all_gib: of all tensors, and more.
    """

    def __init__(
        self,
        program: Program,
        gaps: GapProgram,
        slots: Sequence[Slot],
        used_gib: Sequence[float],
        all_gib: float,
    ) -> None:
        self._program, self._gaps, self._slots = program, gaps, slots
        self._used_gib, self._all_gib = used_gib, all_gib

    def may_be_left_out(self, cap: int | None) -> bool:
        """Whether almost all that could be on the host at once has room there."""
        return not self._gaps.tied and cap is not None and self._most_gib <= _PLENTY * cap / GIB

    def are_kept(
        self, values: NDArray[np.float64], device_cap: int | None, host_cap: int | None
    ) -> bool:
        """Whether a solution found without these rows keeps to them."""
        if host_cap is None:
            return True
        in_flight = np.asarray([values[s.ahead] + values[s.behind] for s in self._slots])
        held = self._at(self._gaps.host_at, values) - in_flight
        if held.max(initial=0.0) > host_cap / GIB + _NOTHING_GIB:
            return False
        if device_cap is None:
            return True
        both = self._at(self._gaps.kept_at, values) + self._at(self._gaps.loaded_at, values)
        both_gib = (device_cap + host_cap) / GIB
        return bool((both + np.asarray(self._used_gib)).max(initial=0.0) <= both_gib + _NOTHING_GIB)

    def add(
        self, kept: Sequence[int], device_cap: int | None, host_cap: int | None
    ) -> tuple[list[int], list[int]]:
        """Rows of the host, and of both memories; `kept` are columns, GiB kept at each segment."""
        if host_cap is None:
            return [], []
        if self._gaps.tied:
            return [self._program.at_most(self._gaps.home_gib(), host_cap / GIB)], []
        host = self._host_rows(host_cap)
        return host, [] if device_cap is None else self._rows_of_both(kept, device_cap + host_cap)

    def _host_rows(self, cap: int) -> list[int]:
        """At every task: what the host holds, but for what is loaded early or not yet stored."""
        held = self._occupied(self._gaps.host_at)
        return [
            self._program.at_most(
                [(column, 1.0), (slot.ahead, -1.0), (slot.behind, -1.0)], cap / GIB
            )
            for column, slot in zip(held, self._slots, strict=True)
        ]

    def _rows_of_both(self, kept: Sequence[int], cap: int) -> list[int]:
        """At every task: what is not made again is somewhere, on the device or on the host."""
        loaded = self._occupied(self._gaps.loaded_at)
        return [
            self._program.at_most([(one, 1.0), (other, 1.0)], cap / GIB - used)
            for one, other, used in zip(kept, loaded, self._used_gib, strict=True)
        ]

    def _occupied(self, stretches: Sequence[Stretch]) -> list[int]:
        return occupancy(self._program, stretches, len(self._slots), self._all_gib)

    def _at(self, stretches: Sequence[Stretch], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """GiB at every segment."""
        change = np.zeros(len(self._slots) + 1)
        for low, high, terms in stretches:
            gib = sum(float(values[column]) * share for column, share in terms)
            change[low] += gib
            change[high] -= gib
        return np.cumsum(change)[:-1]

    @cached_property
    def _most_gib(self) -> float:
        """On the host at once, if everything went there."""
        columns = [c for _, _, terms in self._gaps.host_at for c, _ in terms]
        all_there = np.ones(1 + max(columns, default=0))
        return float(self._at(self._gaps.host_at, all_there).max(initial=0.0))
