"""Homes on a disk: what has no room in host memory is read from there, through a ring of slots.

Parameters that no task changes need no home in host memory where files have them: each load reads
its unit into the next slot of a ring there, as far ahead as slots are free, and copies it from
there to the device.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.traffic import Traffic
from twinstream.planner.lifetimes.uses import Unit, UnitMap, read_only_leaves
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.tensors import DISK

_FEWEST_SLOTS, _MOST_SLOTS = 2, 8  # one is read while another is copied to the device
_RING_SHARE = 0.125  # of host memory that more than the fewest slots may take


@dataclass(frozen=True)
class DiskHomes:
    """The units that are at home on a disk, and the slots in host memory that they pass through."""

    units: tuple[Unit, ...] = ()
    slot_bytes: int = 0
    num_slots: int = 0

    @property
    def ring_bytes(self) -> int:
        """Return the host memory that the slots take."""
        return self.num_slots * self.slot_bytes

    @property
    def disk_bytes(self) -> int:
        """Return the extent of the disk's arena."""
        return sum(align_up(u.tensor.size_bytes, DISK.alignment_bytes) for u in self.units)

    @staticmethod
    def of(
        chain: Chain,
        units: UnitMap,
        at_home: Sequence[Unit],
        residencies: Sequence[Residency],
        traffic: Traffic,
        caps: Caps,
    ) -> "DiskHomes":
        """Return as few as let the rest fit host memory; those that are loaded least often first,
        and of units alike every so-manieth, so that reads are spread over the step.

        Args:
            at_home: what needs a home in host memory or on a disk, in a fixed order.
            caps: within which there is a disk.
        """
        assert caps.disk_bytes is not None, "there is a disk"
        taken = sum(align_up(unit.tensor.size_bytes) for unit in at_home)
        if caps.host_bytes is None or taken <= caps.host_bytes:
            return DiskHomes()
        leaves = read_only_leaves(chain, units)
        loads = Counter(
            residencies[i].unit for i, found in (*traffic.loads.items(), *traffic.ahead.items())
            if found
        )  # fmt: skip
        alike: dict[tuple[int, int], list[Unit]] = {}
        for unit in at_home:
            if leaves.issuperset(unit.leaves) and unit.unit_id not in traffic.host_units:
                key = loads[unit.unit_id], -unit.tensor.size_bytes
                alike.setdefault(key, []).append(unit)
        chosen: set[str] = set()
        ring = largest = left = 0
        for (_, negative), found in sorted(alike.items()):
            largest = max(largest, align_up(-negative))
            ring = _num_slots(largest, caps) * largest
            each = align_up(-negative)
            missing = taken + ring - caps.host_bytes
            count = min(len(found), -(-missing // each), _room(caps, left, -negative))
            chosen |= {found[i * len(found) // count].unit_id for i in range(count)}
            taken -= count * each
            left += count * align_up(-negative, DISK.alignment_bytes)
            if taken + ring <= caps.host_bytes:
                break
        homes = tuple(unit for unit in at_home if unit.unit_id in chosen)
        if not homes:
            return DiskHomes()
        largest = max(align_up(unit.tensor.size_bytes) for unit in homes)
        return DiskHomes(homes, largest, _num_slots(largest, caps))


def ring_bytes(chain: Chain, units: UnitMap, caps: Caps) -> int:
    """Return the host memory that a ring takes of the largest units that may be on a disk."""
    leaves = read_only_leaves(chain, units)
    sizes = [
        align_up(unit.tensor.size_bytes)
        for unit in units.units.values()
        if leaves.issuperset(unit.leaves)
    ]
    largest = max(sizes, default=0)
    return _num_slots(largest, caps) * largest


def _num_slots(size_bytes: int, caps: Caps) -> int:
    """Slots of a ring: as many as a share of host memory holds."""
    if not size_bytes or caps.host_bytes is None:
        return _FEWEST_SLOTS
    return min(_MOST_SLOTS, max(_FEWEST_SLOTS, int(_RING_SHARE * caps.host_bytes) // size_bytes))


def _room(caps: Caps, taken: int, size_bytes: int) -> int:
    """How many more of a size the disk's cap has room for."""
    assert caps.disk_bytes is not None
    return max(0, caps.disk_bytes - taken) // align_up(size_bytes, DISK.alignment_bytes)
