"""The copies that residencies imply.

A residency loads, where it begins, what it reads and neither makes nor finds on the device. It
stores (offloads) what others read later, as soon as that is final.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinstream.planner.lifetimes.host_tasks import HostContent
from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.schedule.chain import Chain

Versions = dict[str, int]


@dataclass
class Traffic:
    """Which versions of which tensors are copied, for which residency (by its number) and when.

    Attributes:
        loads: by residency, what it loads where it begins.
        stores: by position of a task, then residency, what is offloaded after that task.
        ahead: by residency, loads issued in the pass before, of what that pass makes in the end.
        refreshes: by task of the host, then residency: copies into a residency that goes on while
            the host makes a new version.
        initially_loaded: units of which something loads, or the host reads, the version that the
            pass begins with. Their homes must hold the final version when a pass ends.
        host_units: units that the host's own tasks use, in host memory.
    """

    loads: dict[int, Versions] = field(default_factory=dict)
    stores: dict[int, dict[int, Versions]] = field(default_factory=dict)
    ahead: dict[int, Versions] = field(default_factory=dict)
    refreshes: dict[str, dict[int, Versions]] = field(default_factory=dict)
    initially_loaded: set[str] = field(default_factory=set)
    host_units: set[str] = field(default_factory=set)


def traffic_of(chain: Chain, units: UnitMap, residencies: Sequence[Residency]) -> Traffic:
    """Return the copies of these residencies of a chain."""
    return _Copies(chain, units, residencies).traffic


class _Copies:
    def __init__(self, chain: Chain, units: UnitMap, residencies: Sequence[Residency]) -> None:
        self.units, self.residencies = units, residencies
        self.host = HostContent.of(chain, units)
        self.traffic = Traffic(host_units=self.host.units)
        self.final = _final_versions(residencies, self.host)
        self.last_read: dict[tuple[str, int], int] = {}
        for leaf, version in self.host.reads:
            if version == 0 and units.units[units.unit_of_leaf[leaf]].persistent:
                self.traffic.initially_loaded.add(units.unit_of_leaf[leaf])
        for index, residency in enumerate(residencies):
            self._add_loads(index, residency)
        wanted = {(output.tensor, output.version) for output in chain.outputs}
        for index, residency in enumerate(residencies):
            self._add_stores(index, residency, wanted | self.host.reads)

    def _add_loads(self, index: int, residency: Residency) -> None:
        traffic, found = self.traffic, _read_before_made(residency)
        for key, position in found.items():
            self.last_read[key] = max(self.last_read.get(key, -1), position)
        if not residency.enters:
            read = _first_versions(found)
            if self.units.units[residency.unit].persistent and 0 in read.values():
                traffic.initially_loaded.add(residency.unit)
            if residency.ahead is None:
                traffic.loads[index] = read
            else:
                traffic.ahead[index] = {leaf: self.final[leaf] for leaf in read}
        if residency.unit in self.host.units:
            self._add_refreshes(index, residency, list(found))

    def _add_refreshes(
        self, index: int, residency: Residency, needed: list[tuple[str, int]]
    ) -> None:
        if residency.leaves:
            leaves = self.units.units[residency.unit].leaves
            needed += [(leaf, self.final.get(leaf, 0)) for leaf in leaves]
        loaded = self.traffic.loads.get(index, {})
        for leaf, version in needed:
            maker = self.host.makes.get((leaf, version))
            if maker is not None and loaded.get(leaf) != version:
                self.traffic.refreshes.setdefault(maker, {}).setdefault(index, {})[leaf] = version

    def _add_stores(self, index: int, residency: Residency, wanted: set[tuple[str, int]]) -> None:
        traffic = self.traffic
        persistent = self.units.units[residency.unit].persistent
        home_is_valid = not residency.leaves or residency.unit in traffic.initially_loaded
        for (leaf, version), position in _made(residency, self.host.reads).items():
            key = (leaf, version)
            if (
                self.last_read.get(key, -1) > residency.uses[-1].position
                or (persistent and home_is_valid and version == self.final[leaf])
                or key in wanted
            ):
                traffic.stores.setdefault(position, {}).setdefault(index, {})[leaf] = version


def _made(residency: Residency, wanted: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Versions that a residency makes and where: each leaf's last, and the wanted before it."""
    last: dict[str, int] = {}
    found: dict[tuple[str, int], int] = {}
    for use in residency.uses:
        for leaf in use.leaves:
            if leaf.makes is not None:
                last[leaf.leaf] = leaf.makes
                found[leaf.leaf, leaf.makes] = use.position
    return {key: at for key, at in found.items() if last[key[0]] == key[1] or key in wanted}


def _read_before_made(residency: Residency) -> dict[tuple[str, int], int]:
    """Last position at which the residency reads each version that it did not make itself."""
    made: set[tuple[str, int]] = set()
    found: dict[tuple[str, int], int] = {}
    for use in residency.uses:
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


def _final_versions(residencies: Sequence[Residency], host: HostContent) -> Versions:
    final: Versions = {}
    for name, version in host.makes:
        final[name] = max(final.get(name, 0), version)
    for residency in residencies:
        for use in residency.uses:
            for leaf in use.leaves:
                final[leaf.leaf] = max(final.get(leaf.leaf, 0), leaf.makes or 0)
    return final
