"""Copies that stays imply: what each loads at its begin, what it stores as soon as final."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinstream.planner.residency import Stay
from twinstream.planner.uses import UnitMap
from twinstream.schedule.chain import Chain

Versions = dict[str, int]


@dataclass
class Traffic:
    """Loads by stay; stores by task position, then stay: leaf versions.

    `initially_loaded` are units of which a stay loads what the pass begins with: their homes
    must hold the final version when a pass ends.
    """

    loads: dict[int, Versions] = field(default_factory=dict)
    stores: dict[int, dict[int, Versions]] = field(default_factory=dict)
    initially_loaded: set[str] = field(default_factory=set)


def traffic_of(chain: Chain, units: UnitMap, stays: Sequence[Stay]) -> Traffic:
    """Load what a stay reads and did not make or find; store what others need that it made."""
    traffic = Traffic()
    made = [_made(stay) for stay in stays]
    last_read: dict[tuple[str, int], int] = {}
    for index, stay in enumerate(stays):
        found = _read_before_made(stay)
        for key, position in found.items():
            last_read[key] = max(last_read.get(key, -1), position)
        if not stay.enters:
            traffic.loads[index] = _first_versions(found)
            if units.units[stay.unit].persistent and 0 in traffic.loads[index].values():
                traffic.initially_loaded.add(stay.unit)
    final = _final_versions(stays)
    wanted = {(output.tensor, output.version) for output in chain.outputs}
    for index, stay in enumerate(stays):
        persistent = units.units[stay.unit].persistent
        home_is_valid = not stay.leaves or stay.unit in traffic.initially_loaded
        for leaf, (version, position) in made[index].items():
            key = (leaf, version)
            if (
                last_read.get(key, -1) > stay.uses[-1].position
                or (persistent and home_is_valid and version == final[leaf])
                or key in wanted
            ):
                traffic.stores.setdefault(position, {}).setdefault(index, {})[leaf] = version
    return traffic


def _made(stay: Stay) -> dict[str, tuple[int, int]]:
    """Last version that a stay makes of each leaf, and where."""
    found: dict[str, tuple[int, int]] = {}
    for use in stay.uses:
        for leaf in use.leaves:
            if leaf.makes is not None:
                found[leaf.leaf] = (leaf.makes, use.position)
    return found


def _read_before_made(stay: Stay) -> dict[tuple[str, int], int]:
    """Last position at which the stay reads each version that it did not make itself."""
    made: set[tuple[str, int]] = set()
    found: dict[tuple[str, int], int] = {}
    for use in stay.uses:
        for leaf in use.leaves:
            if leaf.reads is not None and (leaf.leaf, leaf.reads) not in made:
                found[leaf.leaf, leaf.reads] = use.position
            if leaf.makes is not None:
                made.add((leaf.leaf, leaf.makes))
    return found


def _first_versions(read: dict[tuple[str, int], int]) -> Versions:
    first: Versions = {}
    for leaf, version in read:
        first.setdefault(leaf, version)
    return first


def _final_versions(stays: Sequence[Stay]) -> Versions:
    final: Versions = {}
    for stay in stays:
        for use in stay.uses:
            for leaf in use.leaves:
                final[leaf.leaf] = max(final.get(leaf.leaf, 0), leaf.makes or 0)
    return final
