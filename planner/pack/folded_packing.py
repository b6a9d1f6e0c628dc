"""Pack the stays of all rounds on the timeline of few, so that steady rounds use equal slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from twinstream.planner.lifetimes.rounds import Folding
from twinstream.planner.lifetimes.stays import Stay
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.limits import LIMITS
from twinstream.planner.pack.board import Ranges, SoftItem
from twinstream.planner.pack.soft_packing import pack_soft

_FRACTIONS = (1.0, 0.5, 0.25, 0.0)  # of the time for copies that a stay would like


@dataclass(frozen=True)
class FoldedPacking:
    """Stays, some with less time for copies, their offsets, and the extent.

    `over_bytes`: by how much what is alive at a folded task sticks out of the cap.
    """

    stays: list[Stay]
    offsets: list[int]
    extent_bytes: int
    over_bytes: dict[int, int]


def pack_folded(
    stays: Sequence[Stay],
    units: UnitMap,
    folding: Folding,
    cap_bytes: int | None,
    moves: int = LIMITS.moves,
) -> FoldedPacking:
    """Offsets of stays under a cap; stays of a unit that fold onto each other share bytes.

    The cost does not grow with the number of rounds. `moves`: as `pack_soft`.
    """
    items = _items(stays, folding)
    packed = pack_soft(
        [SoftItem(item.lives, units.units[item.unit].tensor.size_bytes) for item in items],
        cap_bytes,
        moves,
    )
    found, offsets = list(stays), [0] * len(stays)
    over: dict[int, int] = {}
    for item, offset, life in zip(
        items, packed.offsets.tolist(), packed.lives.tolist(), strict=True
    ):
        for index in item.stays:
            offsets[index] = offset
            found[index] = trimmed(stays[index], _FRACTIONS[life])
        out = offset + units.units[item.unit].tensor.size_bytes
        if cap_bytes is not None and out > cap_bytes:
            for low, high in item.lives[-1]:
                for task in range(low, high):
                    over[task] = max(out - cap_bytes, over.get(task, 0))
    return FoldedPacking(found, offsets, packed.extent_bytes, over)


def trimmed(stay: Stay, share: float) -> Stay:
    """The stay with only a share of the time before its first use and after its last."""
    last = stay.uses[-1].position + 1
    begin, ahead = (stay.begin, None) if stay.enters else _led(stay, share)
    until = last + int((stay.end - last + stay.later) * share)
    end = stay.end if stay.leaves else min(stay.end, until)
    later = max(0, until - stay.end)
    if (begin, end, later, ahead) == (stay.begin, stay.end, stay.later, stay.ahead):
        return stay
    return Stay(stay.unit, begin, end, stay.uses, stay.enters, stay.leaves, later, ahead)


def _led(stay: Stay, share: float) -> tuple[int, tuple[int, int] | None]:
    """Where a stay begins with a share of its lead, and what of that is in the pass before."""
    first, (low, high) = stay.uses[0].position, stay.ahead or (0, 0)
    lead = int((first - stay.begin + high - low) * share)
    before = lead - first
    return max(0, -before), (high - before, high) if before > 0 else None


@dataclass(frozen=True)
class _Item:
    """Stays of a unit that share bytes, and when, folded, they are alive, by share of time."""

    unit: str
    stays: tuple[int, ...]
    lives: tuple[Ranges, ...]


def _items(stays: Sequence[Stay], folding: Folding) -> list[_Item]:
    by_unit: dict[str, list[int]] = {}
    for index, stay in enumerate(stays):
        by_unit.setdefault(stay.unit, []).append(index)
    return [
        _Item(unit, together, _lives([stays[i] for i in together], folding))
        for unit, mine in by_unit.items()
        for together in _sharing(mine, stays, folding)
    ]


def _sharing(mine: Sequence[int], stays: Sequence[Stay], folding: Folding) -> list[tuple[int, ...]]:
    """A unit's stays in groups that fold onto each other, or go over the boundary."""
    group: dict[int, list[int]] = {index: [index] for index in mine}

    def join(one: int, other: int) -> None:
        if group[one] is not group[other]:
            group[one] += group[other]
            for index in group[other]:
                group[index] = group[one]

    over = [index for index in mine if stays[index].enters or stays[index].leaves]
    for one, other in pairwise(over):
        join(one, other)
    pieces = sorted(
        (low, high, index) for index in mine for low, high in _alive([stays[index]], folding)
    )
    reach, owner = -1, -1
    for low, high, index in pieces:
        if low < reach:
            join(owner, index)
        if high > reach:
            reach, owner = high, index
    return sorted({tuple(sorted(found)) for found in group.values()})


def _lives(together: Sequence[Stay], folding: Folding) -> tuple[Ranges, ...]:
    bare = [trimmed(stay, 0.0) for stay in together]
    shortest = _alive(bare, folding)
    if all(a is b for a, b in zip(bare, together, strict=True)):
        return (shortest,) * len(_FRACTIONS)
    longer = [[trimmed(stay, share) for stay in together] for share in _FRACTIONS[:-1]]
    return (*(_alive(stays, folding) for stays in longer), shortest)


def _alive(stays: Sequence[Stay], folding: Folding) -> Ranges:
    held = (own for stay in stays for own in stay.ranges)
    return _merged({piece for own in held for piece in folding.intervals(*own)})


def _merged(intervals: set[tuple[int, int]]) -> Ranges:
    """Disjoint intervals in order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)
