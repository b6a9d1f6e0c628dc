"""Pack the residencies of all rounds onto few rounds, so that steady rounds use equal slots.

Middle rounds are folded onto one: what lies there at the same time shares no bytes in any of them.
So the cost does not grow with the number of rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.rounds import Folding
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.limits import LIMITS
from twinstream.planner.pack.address_map import Ranges, SoftItem
from twinstream.planner.pack.soft_packing import pack_soft

_FRACTIONS = (1.0, 0.5, 0.25, 0.0)  # of the time for copies that a residency would like


@dataclass(frozen=True)
class FoldedPacking:
    """Residencies, some with less time for copies, with their offsets and the extent of all.

    `over_bytes`: by how much what is alive at a folded task sticks out of the cap.
    """

    residencies: list[Residency]
    offsets: list[int]
    extent_bytes: int
    over_bytes: dict[int, int]


def pack_folded(
    residencies: Sequence[Residency],
    units: UnitMap,
    folding: Folding,
    cap_bytes: int | None,
    moves: int = LIMITS.moves,
) -> FoldedPacking:
    """Give residencies offsets under a cap; those of a unit that fold onto each other share bytes.

    The cost does not grow with the number of rounds. `moves`: as `pack_soft`.
    """
    items = _items(residencies, folding)
    packed = pack_soft(
        [SoftItem(item.lives, units.units[item.unit].tensor.size_bytes) for item in items],
        cap_bytes,
        moves,
    )
    found, offsets = list(residencies), [0] * len(residencies)
    over: dict[int, int] = {}
    for item, offset, life in zip(
        items, packed.offsets.tolist(), packed.lives.tolist(), strict=True
    ):
        for index in item.residencies:
            offsets[index] = offset
            found[index] = trimmed(residencies[index], _FRACTIONS[life])
        out = offset + units.units[item.unit].tensor.size_bytes
        if cap_bytes is not None and out > cap_bytes:
            for low, high in item.lives[-1]:
                for task in range(low, high):
                    over[task] = max(out - cap_bytes, over.get(task, 0))
    return FoldedPacking(found, offsets, packed.extent_bytes, over)


def trimmed(residency: Residency, share: float) -> Residency:
    """Return the residency with only a share of its time for copies, before and after its uses."""
    last = residency.uses[-1].position + 1
    begin, ahead = (residency.begin, None) if residency.enters else _led(residency, share)
    until = last + int((residency.end - last + residency.later) * share)
    end = residency.end if residency.leaves else min(residency.end, until)
    later = max(0, until - residency.end)
    if (begin, end, later, ahead) == (
        residency.begin,
        residency.end,
        residency.later,
        residency.ahead,
    ):
        return residency
    return Residency(
        residency.unit, begin, end, residency.uses, residency.enters, residency.leaves, later, ahead
    )


def _led(residency: Residency, share: float) -> tuple[int, tuple[int, int] | None]:
    """Where a residency begins with a share of its lead, and what of that is in the pass before."""
    first, (low, high) = residency.uses[0].position, residency.ahead or (0, 0)
    lead = int((first - residency.begin + high - low) * share)
    before = lead - first
    return max(0, -before), (high - before, high) if before > 0 else None


@dataclass(frozen=True)
class _Item:
    """Residencies of a unit that share bytes, and when, by share of time, they are alive."""

    unit: str
    residencies: tuple[int, ...]
    lives: tuple[Ranges, ...]


def _items(residencies: Sequence[Residency], folding: Folding) -> list[_Item]:
    by_unit: dict[str, list[int]] = {}
    for index, residency in enumerate(residencies):
        by_unit.setdefault(residency.unit, []).append(index)
    return [
        _Item(unit, together, _lives([residencies[i] for i in together], folding))
        for unit, mine in by_unit.items()
        for together in _sharing(mine, residencies, folding)
    ]


def _sharing(
    mine: Sequence[int], residencies: Sequence[Residency], folding: Folding
) -> list[tuple[int, ...]]:
    """A unit's residencies in groups that fold onto each other, or go over the boundary."""
    group: dict[int, list[int]] = {index: [index] for index in mine}

    def join(one: int, other: int) -> None:
        if group[one] is not group[other]:
            group[one] += group[other]
            for index in group[other]:
                group[index] = group[one]

    over = [index for index in mine if residencies[index].enters or residencies[index].leaves]
    for one, other in pairwise(over):
        join(one, other)
    pieces = sorted(
        (low, high, index) for index in mine for low, high in _alive([residencies[index]], folding)
    )
    reach, owner = -1, -1
    for low, high, index in pieces:
        if low < reach:
            join(owner, index)
        if high > reach:
            reach, owner = high, index
    return sorted({tuple(sorted(found)) for found in group.values()})


def _lives(together: Sequence[Residency], folding: Folding) -> tuple[Ranges, ...]:
    bare = [trimmed(residency, 0.0) for residency in together]
    shortest = _alive(bare, folding)
    if all(a is b for a, b in zip(bare, together, strict=True)):
        return (shortest,) * len(_FRACTIONS)
    longer = [[trimmed(residency, share) for residency in together] for share in _FRACTIONS[:-1]]
    return (*(_alive(residencies, folding) for residencies in longer), shortest)


def _alive(residencies: Sequence[Residency], folding: Folding) -> Ranges:
    held = (own for residency in residencies for own in residency.ranges)
    return _merged({piece for own in held for piece in folding.intervals(*own)})


def _merged(intervals: set[tuple[int, int]]) -> Ranges:
    """Return disjoint intervals in order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)
