"""Fill the device: decide over which gaps content stays, so that memory is used up and not overrun.

The program's fractions, rounded, overrun the cap in some places and leave room in others. Gaps are
given up where too much is alive, first those that save the fewest copies for the time that they
take memory, and content stays where there is room, in the reverse order. Where host memory is
scarce, what has its home there anyway is given up rather than what would need one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.decide.decisions import Decisions, GapKey
from twinstream.planner.decide.margins import Bytes, alive_bytes
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.residencies import content_gaps
from twinstream.planner.limits import SearchLimits


@dataclass(frozen=True)
class Pressure:
    """How much a copied byte costs in each direction, relative to the other.

    `home`: what a byte costs by the same measure that has its home on the host, over the times that
    it is copied in a step.
    """

    load: float
    store: float
    home: float = 0.0

    @staticmethod
    def of(solved: Relaxation, num_rounds: int, limits: SearchLimits) -> "Pressure":
        """Read the costs off the program's prices of the links and of host memory."""
        prices = solved.link_s_per_gb_per_s
        shared = prices.get("pcie", 0.0) + prices.get("host_dram", 0.0)
        load, store = prices.get("h2d", 0.0) + shared, prices.get("d2h", 0.0) + shared
        total = load + store
        copied_s_per_gib = 2 * limits.copy_cost / 1e3  # there and back
        if solved.step_s:
            copied_s_per_gib = max(copied_s_per_gib, total / solved.step_s)
        home = solved.host_s_per_gib / copied_s_per_gib / num_rounds
        if total <= 0:
            return Pressure(1.0, 1.0, home)
        least = limits.least_pressure
        return Pressure(load / total + least, store / total + least, home)


def filled(
    sequence: TaskSequence, decisions: Decisions, capacity: Bytes, pressure: Pressure
) -> Decisions | None:
    """Return decisions whose residencies fill the capacity; None where none fit it.

    Copies in flight are not counted.

    Args:
        sequence: of three rounds at the most.
        decisions: where to start from.
        capacity: most bytes that may be alive at each task.
        pressure: what copies cost.
    """
    gaps = _Gaps.of(sequence, decisions, pressure)
    kept = np.asarray([decisions.kept.get(key, True) for key in gaps.keys], dtype=np.bool_)
    alive = alive_bytes(sequence, sequence.residencies(gaps.decided(decisions, kept)))
    left = capacity - alive
    gaps.give_up(kept, left)
    if int(left.min()) < 0:
        return None
    if pressure.home > 0.0:
        gaps.take_up_homes(kept, left)
    gaps.take_up(kept, left)
    return gaps.decided(decisions, kept)


@dataclass(frozen=True)
class _Gaps:
    """All gaps that may change, by key: the tasks inside (several ranges), bytes, and their worth.

    `worth`: copies saved, by their pressure, for each ns that a byte takes memory, which is at most
    `longest_ns`. `home`: what a home costs. `settled` are decisions on gaps that may not change.
    """

    keys: list[GapKey]
    ranges: list[list[tuple[int, int]]]
    sizes: Bytes
    worth: NDArray[np.float64]
    longest_ns: NDArray[np.float64]
    home: float
    settled: dict[GapKey, bool]

    @staticmethod
    def of(sequence: TaskSequence, decisions: Decisions, pressure: Pressure) -> "_Gaps":
        ranges: dict[GapKey, list[tuple[int, int]]] = {}
        longest_ns: dict[GapKey, float] = {}
        saved: dict[GapKey, float] = {}
        units, end = sequence.units.units, len(sequence.tasks)
        made = _made_in_pass(sequence)
        total_ns = sequence.clock.start_ns[-1]
        for name, before, after in content_gaps(sequence.uses, sequence.units):
            if decisions.is_fixed(units[name]):
                continue
            key = (name, sequence.gap_place(before, after))
            over = after <= before
            inside = [(before + 1, end), (0, after)] if over else [(before + 1, after)]
            ranges.setdefault(key, []).extend(r for r in inside if r[0] < r[1])
            gap_ns = sequence.clock.start_ns[after] - sequence.clock.start_ns[before + 1]
            gap_ns += total_ns if over else 0.0
            longest_ns[key] = max(longest_ns.get(key, 1.0), gap_ns)
            stored = pressure.store if (name, before) in made or over else 0.0
            saves = 0.0 if over and name in sequence.renewed else pressure.load + stored
            saved[key] = max(saved.get(key, 0.0), saves)
        keys = list(ranges)
        return _Gaps(
            keys,
            [ranges[key] for key in keys],
            np.asarray([align_up(units[name].tensor.size_bytes) for name, _ in keys], np.int64),
            np.asarray([saved[key] / longest_ns[key] for key in keys], np.float64),
            np.asarray([longest_ns[key] for key in keys], np.float64),
            pressure.home,
            {
                key: kept
                for key, kept in decisions.kept.items()
                if decisions.is_fixed(units[key[0]])
            },
        )

    def decided(self, decisions: Decisions, kept: NDArray[np.bool_]) -> Decisions:
        return decisions.with_kept(self.settled | dict(zip(self.keys, kept.tolist(), strict=True)))

    def give_up(self, kept: NDArray[np.bool_], left: Bytes) -> None:
        """Give up gaps, the least worth first, wherever more is alive than fits."""
        at_home = {self.keys[number][0] for number in np.flatnonzero(~kept)}
        homeless = np.asarray([name not in at_home for name, _ in self.keys], np.bool_)
        worth = self.worth + self.home * homeless / self.longest_ns
        for number in np.argsort(worth, kind="stable"):
            if kept[number] and any(int(left[a:b].min()) < 0 for a, b in self.ranges[number]):
                kept[number] = False
                for low, high in self.ranges[number]:
                    left[low:high] += self.sizes[number]

    def take_up_homes(self, kept: NDArray[np.bool_], left: Bytes) -> None:
        """Keep units for good wherever there is room, so that they need no home on the host."""
        by_unit: dict[str, list[int]] = {}
        for number in np.flatnonzero(~kept).tolist():
            by_unit.setdefault(self.keys[number][0], []).append(number)
        shortest_first = sorted(by_unit.values(), key=lambda mine: self.longest_ns[mine].sum())
        for numbers in shortest_first:
            without = left.copy()
            for number in numbers:
                for low, high in self.ranges[number]:
                    without[low:high] -= self.sizes[number]
            if int(without.min()) >= 0:
                left[:] = without
                kept[numbers] = True

    def take_up(self, kept: NDArray[np.bool_], left: Bytes) -> None:
        """Keep content wherever there is room, the most worth first."""
        for number in np.argsort(-self.worth, kind="stable"):
            size = int(self.sizes[number])
            if kept[number] or any(int(left[a:b].min()) < size for a, b in self.ranges[number]):
                continue
            kept[number] = True
            for low, high in self.ranges[number]:
                left[low:high] -= size


def _made_in_pass(sequence: TaskSequence) -> set[tuple[str, int]]:
    """(unit, task of a use) after which its content is not what the pass began with."""
    found: set[tuple[str, int]] = set()
    for name, used in sequence.uses.items():
        made = False
        for use in used:
            made = made or any(leaf.makes is not None for leaf in use.leaves)
            if made:
                found.add((name, use.position))
    return found
