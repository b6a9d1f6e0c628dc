"""Copies that stays imply: what each loads at its begin, what it stores as soon as final."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinstream.planner.lifetimes.host_tasks import HostContent
from twinstream.planner.lifetimes.stays import Stay
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.schedule.chain import Chain

Versions = dict[str, int]


@dataclass
class Traffic:
    """Loads by stay; stores by task position, then stay: leaf versions.

    `ahead` are the loads, by stay, that are issued in the pass before: what that makes in the end.
    `refreshes` are copies into a stay that goes on while the host makes a new version: by the
    host's task, then stay. `initially_loaded` are units of which a stay loads, or the host reads,
    what the pass begins with: their homes must hold the final version when a pass ends.
    `host_units` are what the host's tasks use, at home.
    """

    loads: dict[int, Versions] = field(default_factory=dict)
    stores: dict[int, dict[int, Versions]] = field(default_factory=dict)
    ahead: dict[int, Versions] = field(default_factory=dict)
    refreshes: dict[str, dict[int, Versions]] = field(default_factory=dict)
    initially_loaded: set[str] = field(default_factory=set)
    host_units: set[str] = field(default_factory=set)


def traffic_of(chain: Chain, units: UnitMap, stays: Sequence[Stay]) -> Traffic:
    """Load what a stay reads and did not make or find; store what others need that it made."""
    return _Copies(chain, units, stays).traffic


class _Copies:
    def __init__(self, chain: Chain, units: UnitMap, stays: Sequence[Stay]) -> None:
        self.units, self.stays = units, stays
        self.host = HostContent.of(chain, units)
        self.traffic = Traffic(host_units=self.host.units)
        self.final = _final_versions(stays, self.host)
        self.last_read: dict[tuple[str, int], int] = {}
        for leaf, version in self.host.reads:
            if version == 0 and units.units[units.unit_of_leaf[leaf]].persistent:
                self.traffic.initially_loaded.add(units.unit_of_leaf[leaf])
        for index, stay in enumerate(stays):
            self._add_loads(index, stay)
        wanted = {(output.tensor, output.version) for output in chain.outputs}
        for index, stay in enumerate(stays):
            self._add_stores(index, stay, wanted | self.host.reads)

    def _add_loads(self, index: int, stay: Stay) -> None:
        traffic, found = self.traffic, _read_before_made(stay)
        for key, position in found.items():
            self.last_read[key] = max(self.last_read.get(key, -1), position)
        if not stay.enters:
            read = _first_versions(found)
            if self.units.units[stay.unit].persistent and 0 in read.values():
                traffic.initially_loaded.add(stay.unit)
            if stay.ahead is None:
                traffic.loads[index] = read
            else:
                traffic.ahead[index] = {leaf: self.final[leaf] for leaf in read}
        if stay.unit in self.host.units:
            self._add_refreshes(index, stay, list(found))

    def _add_refreshes(self, index: int, stay: Stay, needed: list[tuple[str, int]]) -> None:
        if stay.leaves:
            leaves = self.units.units[stay.unit].leaves
            needed += [(leaf, self.final.get(leaf, 0)) for leaf in leaves]
        loaded = self.traffic.loads.get(index, {})
        for leaf, version in needed:
            maker = self.host.makes.get((leaf, version))
            if maker is not None and loaded.get(leaf) != version:
                self.traffic.refreshes.setdefault(maker, {}).setdefault(index, {})[leaf] = version

    def _add_stores(self, index: int, stay: Stay, wanted: set[tuple[str, int]]) -> None:
        traffic = self.traffic
        persistent = self.units.units[stay.unit].persistent
        home_is_valid = not stay.leaves or stay.unit in traffic.initially_loaded
        for (leaf, version), position in _made(stay, self.host.reads).items():
            key = (leaf, version)
            if (
                self.last_read.get(key, -1) > stay.uses[-1].position
                or (persistent and home_is_valid and version == self.final[leaf])
                or key in wanted
            ):
                traffic.stores.setdefault(position, {}).setdefault(index, {})[leaf] = version


def _made(stay: Stay, wanted: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Versions that a stay makes and where: each leaf's last, and the wanted before it."""
    last: dict[str, int] = {}
    found: dict[tuple[str, int], int] = {}
    for use in stay.uses:
        for leaf in use.leaves:
            if leaf.makes is not None:
                last[leaf.leaf] = leaf.makes
                found[leaf.leaf, leaf.makes] = use.position
    return {key: at for key, at in found.items() if last[key[0]] == key[1] or key in wanted}


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


def _final_versions(stays: Sequence[Stay], host: HostContent) -> Versions:
    final: Versions = {}
    for name, version in host.makes:
        final[name] = max(final.get(name, 0), version)
    for stay in stays:
        for use in stay.uses:
            for leaf in use.leaves:
                final[leaf.leaf] = max(final.get(leaf.leaf, 0), leaf.makes or 0)
    return final
