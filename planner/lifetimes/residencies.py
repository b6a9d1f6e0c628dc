"""When each unit is on the device: its residencies, from its uses and a rule for gaps.

A *gap* is the time between two uses of a unit. Where the rule keeps content over a gap, the uses
before and after it are one residency; where it does not, the unit leaves the device, its bytes
serve others meanwhile, and it is loaded again.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from twinstream.planner.lifetimes.uses import Unit, UnitMap, Use

KeepRule = Callable[[Unit, float], bool]
GapRule = Callable[[Unit, int, int], bool]


@dataclass(frozen=True, slots=True)
class Residency:
    """A unit's time on the device: positions [begin, end) of the task sequence.

    Attributes:
        begin: where the load may be issued.
        end: where the bytes may be given to others.
        enters: the content is there from the pass before.
        leaves: the content is kept there for the pass after.
        later: how many first tasks of the pass after still need the bytes, since the offload
            outlasts the pass.
        ahead: positions of the pass before, its last ones, at which the load already needs the
            bytes.
    """

    unit: str
    begin: int
    end: int
    uses: tuple[Use, ...]
    enters: bool = False
    leaves: bool = False
    later: int = 0
    ahead: tuple[int, int] | None = None

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The positions, in any pass, at which nothing else may have its bytes."""
        found = [(self.begin, self.end)]
        if self.later:
            found.append((0, self.later))
        if self.ahead is not None:
            found.append(self.ahead)
        return tuple(found)

    def continues_in(self, after: "Residency") -> bool:
        """Whether the next residency of the unit begins with the content that this one leaves."""
        return _same_content(self.uses, after.uses[0])


@dataclass(frozen=True)
class Margins:
    """Time to fetch a unit before its first use, and to offload it after its last."""

    lead_ns: float
    drain_ns: float


class TaskClock:
    """Times of a task sequence when compute never waits: the measure of gaps."""

    def __init__(self, alone_ns: Sequence[float]) -> None:
        self.start_ns = [0.0]
        for duration in alone_ns:
            self.start_ns.append(self.start_ns[-1] + duration)

    @property
    def num_tasks(self) -> int:
        return len(self.start_ns) - 1

    def gap_ns(self, before: int, after: int) -> float:
        """Compute time between the end of task `before` and the start of task `after`."""
        return self.start_ns[after] - self.start_ns[before + 1]

    def position_before(self, position: int, lead_ns: float) -> int:
        """The last position at least `lead_ns` before task `position` starts (0 at the least)."""
        begin_ns = self.start_ns[position] - lead_ns
        return max(0, bisect_right(self.start_ns, begin_ns, hi=position + 1) - 1)

    def position_after(self, position: int, drain_ns: float) -> int:
        """The first position at least `drain_ns` after task `position` ends.

        From the number of tasks on it is in the pass after, no later than where that ends.
        """
        end_ns = self.start_ns[position + 1] + drain_ns
        if end_ns <= self.start_ns[-1]:
            return bisect_left(self.start_ns, end_ns, lo=position + 1)
        later = bisect_left(self.start_ns, end_ns - self.start_ns[-1])
        return self.num_tasks + min(later, self.num_tasks)


def residency_intervals(
    units: UnitMap, residencies: Sequence[Residency]
) -> list[tuple[int, int, int]]:
    """Return (begin, end, size_bytes) of every residency, in the positions of one pass.

    A residency that outlasts the pass has a second interval from position 0 on, and one that is
    loaded in the pass before a second interval at the end. Where one leaves its content for the
    pass after, the one that enters there has the same bytes, which are counted once.
    """
    intervals = []
    entered = {residency.unit: residency.end for residency in residencies if residency.enters}
    for residency in residencies:
        size_bytes = units.units[residency.unit].tensor.size_bytes
        intervals.append((residency.begin, residency.end, size_bytes))
        if residency.ahead is not None:
            intervals.append((*residency.ahead, size_bytes))
        begin = entered.get(residency.unit, 0) if residency.leaves else 0
        if begin < residency.later:
            intervals.append((begin, residency.later, size_bytes))
    return intervals


def unbroken_residencies(
    uses: dict[str, list[Use]], units: UnitMap, num_tasks: int
) -> list[Residency]:
    """Keep everything: persistent units for the whole pass, others from first to last use."""
    residencies = []
    for name, used in uses.items():
        if units.units[name].persistent:
            residencies.append(Residency(name, 0, num_tasks, tuple(used), enters=True, leaves=True))
        else:
            residencies += [
                Residency(name, group[0].position, group[-1].position + 1, tuple(group))
                for group in _groups(used, keep=lambda before, after: True)
            ]
    return residencies


def chosen_residencies(
    uses: dict[str, list[Use]], units: UnitMap, keep: GapRule, num_tasks: int
) -> list[Residency]:
    """Keep content over the gaps that a rule names, also over the boundary between passes.

    Each residency begins at its first use and ends after its last: time for copies is not in it.
    """
    residencies: list[Residency] = []
    for name, used in uses.items():
        unit = units.units[name]

        def kept(before: Use, after: Use, unit: Unit = unit) -> bool:
            return keep(unit, before.position, after.position)

        groups = _groups(used, kept)
        bare = [Residency(name, g[0].position, g[-1].position + 1, tuple(g)) for g in groups]
        if unit.persistent and kept(used[-1], used[0]):
            bare[0] = replace(bare[0], begin=0, enters=True)
            bare[-1] = replace(bare[-1], end=num_tasks, leaves=True)
        residencies += bare
    return residencies


def content_gaps(uses: dict[str, list[Use]], units: UnitMap) -> list[tuple[str, int, int]]:
    """(unit, task before, task after) of all gaps over which content may stay or leave.

    Those of persistent units over the boundary between passes have `after` <= `before`.
    """
    found: list[tuple[str, int, int]] = []
    for name, used in uses.items():
        for group in _groups(used, keep=lambda before, after: True):
            found += [
                (name, before.position, after.position)
                for before, after in pairwise(group)
                if after.position > before.position + 1
            ]
        if units.units[name].persistent:
            found.append((name, used[-1].position, used[0].position))
    return found


def streaming_residencies(
    uses: dict[str, list[Use]], units: UnitMap, clock: TaskClock, keep: KeepRule, margins: Margins
) -> list[Residency]:
    """A unit leaves the device when its content is dead, or `keep` says no to the gap ahead.

    Residencies of the same content whose margins would touch are one: the unit would be there all
    the time anyway. Other content is loaded when that before it is no longer used, since they may
    share bytes. No residency crosses the boundary between passes.
    """
    residencies: list[Residency] = []
    for name, used in uses.items():
        unit = units.units[name]

        def stays_for_gap(before: Use, after: Use, unit: Unit = unit) -> bool:
            return keep(unit, clock.gap_ns(before.position, after.position))

        merged: list[Residency] = []
        for group in _groups(used, stays_for_gap):
            begin, end = _with_margins(group, clock, margins)
            if merged and begin <= merged[-1].end and _same_content(merged[-1].uses, group[0]):
                last = merged[-1]
                merged[-1] = Residency(name, last.begin, end, (*last.uses, *group))
                continue
            if merged:
                begin = max(begin, merged[-1].uses[-1].position + 1)
            merged.append(Residency(name, begin, end, tuple(group)))
        residencies += merged
    return residencies


def _with_margins(group: Sequence[Use], clock: TaskClock, margins: Margins) -> tuple[int, int]:
    """Lead for what is read first, drain for what was written (it may have to be offloaded)."""
    first, last = group[0], group[-1]
    loads = any(leaf.reads is not None for leaf in first.leaves)
    begin = clock.position_before(first.position, margins.lead_ns) if loads else first.position
    written = any(leaf.makes is not None for use in group for leaf in use.leaves)
    drain = margins.drain_ns if written else 0.0
    return begin, min(clock.num_tasks, clock.position_after(last.position, drain))


def _groups(used: Sequence[Use], keep: Callable[[Use, Use], bool]) -> list[list[Use]]:
    """Cut the uses where the content in between is dead, new from the host, or not kept."""
    groups: list[list[Use]] = []
    left: dict[str, int] = {}
    for use in used:
        goes_on = bool(groups) and _is_left(left, use)
        if goes_on and use.position != groups[-1][-1].position + 1:
            goes_on = keep(groups[-1][-1], use)
        if goes_on:
            groups[-1].append(use)
        else:
            groups.append([use])
            left = {}
        _leave(left, use)
    return groups


def _same_content(group: Sequence[Use], use: Use) -> bool:
    """Whether `use` needs content that the group leaves: it reads that, or adds another leaf."""
    left: dict[str, int] = {}
    for earlier in group:
        _leave(left, earlier)
    return _is_left(left, use)


def _leave(left: dict[str, int], use: Use) -> None:
    """Versions of leaves after a use."""
    for leaf in use.leaves:
        made = leaf.makes if leaf.makes is not None else leaf.reads
        if made is not None:
            left[leaf.leaf] = made


def _is_left(left: dict[str, int], use: Use) -> bool:
    reads = [leaf for leaf in use.leaves if leaf.reads is not None]
    if reads:
        return all(left.get(leaf.leaf, leaf.reads) == leaf.reads for leaf in reads)
    return bool(left) and all(leaf.leaf not in left for leaf in use.leaves)
