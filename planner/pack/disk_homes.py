"""Homes on a disk: what has no room in host memory lies there, and passes through rings of slots.

Each load reads its unit into the next bytes of a ring in host memory, as far ahead as these are
free, and copies it from there to the device. Each store copies what became final into the next
bytes of a second ring, and writes it from there. Parameters that no task changes are in files
already; anything else only where the drive's rate of writes is known.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinstream.hardware_profiles.memories import DISK_READS, DISK_WRITES, drive_ns_per_byte
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.traffic import Traffic
from twinstream.planner.lifetimes.uses import Unit, UnitMap, read_only_leaves
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.tensors import DISK

_FEWEST_SLOTS, _MOST_SLOTS = 2, 8  # one is read while another is copied to the device
_RING_SHARE = 0.125  # of host memory that more than the fewest slots of a ring may take


@dataclass(frozen=True)
class Drive:
    """A drive for what host memory lacks room for; `write_ns` is None of one that is only read.

    Attributes:
        read_ns, write_ns: of a byte.
    """

    cap_bytes: int
    host_bytes: int | None
    read_ns: float
    write_ns: float | None

    @staticmethod
    def of(machine: Machine, caps: Caps) -> "Drive | None":
        """Return the machine's, if the caps have one."""
        if caps.disk_bytes is None:
            return None
        writes = machine.disk_write_bytes_per_s is not None
        write_ns = drive_ns_per_byte(machine, DISK_WRITES) if writes else None
        read_ns = drive_ns_per_byte(machine, DISK_READS)
        return Drive(caps.disk_bytes, caps.host_bytes, read_ns, write_ns)

    def ring_bytes(self, largest: int) -> int:
        """Return the size of a ring for units of so many bytes at most: more of them in more host
        memory."""
        most = _FEWEST_SLOTS
        if largest and self.host_bytes is not None:
            most = max(most, int(_RING_SHARE * self.host_bytes) // largest)
        return min(_MOST_SLOTS, most) * largest

    def room(self, taken: int, size_bytes: int) -> int:
        """Return how many more of a size its cap has room for."""
        return max(0, self.cap_bytes - taken) // align_up(size_bytes, DISK.alignment_bytes)


@dataclass(frozen=True)
class DiskHomes:
    """The units that are at home on a disk, and the rings in host memory that they pass through."""

    units: tuple[Unit, ...] = ()
    read_ring_bytes: int = 0
    write_ring_bytes: int = 0

    @property
    def ring_bytes(self) -> int:
        """Return the host memory that both rings take."""
        return self.read_ring_bytes + self.write_ring_bytes

    @staticmethod
    def of(
        chain: Chain,
        units: UnitMap,
        at_home: Sequence[Unit],
        residencies: Sequence[Residency],
        traffic: Traffic,
        drive: Drive,
    ) -> "DiskHomes":
        """Return as few as let the rest fit host memory; those first that take the least of the
        drive's time by byte, and of units alike every so-manieth, so that it is spread over the
        step. Rings are for the largest: where smaller ones suffice that costs less.

        Args:
            at_home: what needs a home in host memory or on a disk, in a fixed order.
        """
        taken = sum(align_up(unit.tensor.size_bytes) for unit in at_home)
        if drive.host_bytes is None or taken <= drive.host_bytes:
            return DiskHomes()
        loads = Counter(
            residencies[i].unit for i, found in (*traffic.loads.items(), *traffic.ahead.items())
            if found
        )  # fmt: skip
        stores = Counter(residencies[i].unit for found in traffic.stores.values() for i in found)
        alike: dict[_Kind, list[Unit]] = {}
        for unit in _possible(chain, units, at_home, traffic, drive):
            read, written = loads[unit.unit_id], stores[unit.unit_id]
            cost_ns = read * drive.read_ns + written * (drive.write_ns or 0.0)
            kind = _Kind(cost_ns, -unit.tensor.size_bytes, read > 0, written > 0)
            alike.setdefault(kind, []).append(unit)
        choices = [
            _Choice.of(
                {kind: alike[kind] for kind in alike if kind.negative >= largest}, taken, drive
            )
            for largest in sorted({kind.negative for kind in alike})
        ]
        best = min(choices, key=lambda one: (one.missing, one.cost_ns), default=None)
        if best is None:
            return DiskHomes()
        homes = tuple(unit for unit in at_home if unit.unit_id in best.units)
        return DiskHomes(homes, best.read_ring_bytes, best.write_ring_bytes)


class _Kind(NamedTuple):
    """Units that are alike: what a byte takes of the drive's time in a step, and their size."""

    cost_ns: float
    negative: int  # so that the larger come first
    is_read: bool
    is_written: bool


@dataclass(frozen=True)
class _Choice:
    """Units for the disk; `missing` bytes do not fit the host for all that."""

    units: frozenset[str]
    read_ring_bytes: int
    write_ring_bytes: int
    missing: int
    cost_ns: float

    @staticmethod
    def of(alike: Mapping[_Kind, Sequence[Unit]], taken: int, drive: Drive) -> "_Choice":
        assert drive.host_bytes is not None, "there is a cap to fit"
        chosen: set[str] = set()
        read_ring = write_ring = left = 0
        missing, cost_ns = taken - drive.host_bytes, 0.0
        for kind, found in sorted(alike.items()):
            each, room = align_up(-kind.negative), drive.room(left, -kind.negative)
            if not room:
                continue
            ring = drive.ring_bytes(each)
            missing -= read_ring + write_ring
            read_ring = max(read_ring, ring if kind.is_read else 0)
            write_ring = max(write_ring, ring if kind.is_written else 0)
            missing += read_ring + write_ring
            count = max(0, min(len(found), -(-missing // each), room))
            chosen |= {found[i * len(found) // count].unit_id for i in range(count)}
            missing -= count * each
            left += count * align_up(-kind.negative, DISK.alignment_bytes)
            cost_ns -= count * kind.negative * kind.cost_ns
            if missing <= 0:
                break
        return _Choice(frozenset(chosen), read_ring, write_ring, max(0, missing), cost_ns)


def _possible(
    chain: Chain, units: UnitMap, at_home: Sequence[Unit], traffic: Traffic, drive: Drive
) -> Iterable[Unit]:
    """What may lie on the drive: nothing that the host itself fills, takes or computes on."""
    if drive.write_ns is None:
        read_only = read_only_leaves(chain, units)
        found = (unit for unit in at_home if read_only.issuperset(unit.leaves))
    else:
        names = {one.tensor for one in chain.inputs} | {one.tensor for one in chain.outputs}
        of_host = {units.unit_of_leaf[units.leaves(name, None)[0]] for name in names}
        found = (unit for unit in at_home if unit.unit_id not in of_host)
    return (unit for unit in found if unit.unit_id not in traffic.host_units)


def ring_bytes(chain: Chain, units: UnitMap, drive: Drive) -> int:
    """Return the host memory that rings take of the largest units that persist and may be there."""
    read_only = read_only_leaves(chain, units)
    persistent = [unit for unit in units.units.values() if unit.persistent]
    if drive.write_ns is None:
        persistent = [unit for unit in persistent if read_only.issuperset(unit.leaves)]
    largest = max((align_up(unit.tensor.size_bytes) for unit in persistent), default=0)
    return (1 if drive.write_ns is None else 2) * drive.ring_bytes(largest)
