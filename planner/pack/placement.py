"""A placement: the tasks that run, the offset of each residency, and the homes on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.traffic import Traffic, traffic_of
from twinstream.planner.lifetimes.uses import Unit, UnitMap
from twinstream.planner.pack.disk_homes import DiskHomes, Drive
from twinstream.schedule.chain import Chain, Task


@dataclass(frozen=True)
class Placement:
    """Whole decisions with their offsets, from which a schedule is written out.

    `drive` is for what has no room on the host.
    """

    chain: Chain
    tasks: Sequence[Task]
    units: UnitMap
    residencies: Sequence[Residency]
    offsets: Sequence[int]
    drive: Drive | None = None

    def same_as(self, other: "Placement") -> bool:
        """Return whether another placement of the same chain comes to the same schedule."""
        mine, others = (self.residencies, self.offsets), (other.residencies, other.offsets)
        return self.tasks == other.tasks and mine == others

    @cached_property
    def traffic(self) -> Traffic:
        """Return the copies that the residencies imply."""
        return traffic_of(self.chain, self.units, self.residencies)

    @cached_property
    def on_disk(self) -> DiskHomes:
        """Return the units that are at home on a disk."""
        if self.drive is None:
            return DiskHomes()
        return DiskHomes.of(
            self.chain, self.units, self._at_home, self.residencies, self.traffic, self.drive
        )

    @cached_property
    def host_units(self) -> list[Unit]:
        """Units that need a home in host memory, in a fixed order."""
        elsewhere = {unit.unit_id for unit in self.on_disk.units}
        return [unit for unit in self._at_home if unit.unit_id not in elsewhere]

    @cached_property
    def _at_home(self) -> list[Unit]:
        """Units that need a home off the device, in a fixed order.

        What persists and is in no residency, since no task uses it, stays there.
        """
        traffic, residencies = self.traffic, self.residencies
        loads = (*traffic.loads.items(), *traffic.ahead.items())
        moved = {residencies[i].unit for i, leaves in loads if leaves}
        moved |= {residencies[i].unit for stores in traffic.stores.values() for i in stores}
        moved |= traffic.host_units
        used = {residency.unit for residency in residencies}
        moved |= {
            name for name, unit in self.units.units.items() if unit.persistent and name not in used
        }
        return [unit for name, unit in self.units.units.items() if name in moved]

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host arena."""
        homes = sum(align_up(unit.tensor.size_bytes) for unit in self.host_units)
        return homes + self.on_disk.ring_bytes

    def host_overflow_task(self, cap_bytes: int) -> str:
        """The task whose offload is the first to find no room under the cap."""
        units, tasks = self.units.units, self.tasks
        homes = {unit.unit_id for unit in self.host_units}
        taken = sum(align_up(units[u].tensor.size_bytes) for u in homes if units[u].persistent)
        if taken > cap_bytes:
            return tasks[0].task_id
        seen: set[str] = set()
        for position, stores in sorted(self.traffic.stores.items()):
            for index in stores:
                unit = units[self.residencies[index].unit]
                if not unit.persistent and unit.unit_id not in seen:
                    seen.add(unit.unit_id)
                    taken += align_up(unit.tensor.size_bytes)
                    if taken > cap_bytes:
                        return tasks[position].task_id
        return tasks[-1].task_id
