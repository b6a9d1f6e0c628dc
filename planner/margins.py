"""How early to load and how long to hold for an offload, from the backlog of the copy queues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twinstream.hardware_profiles.cost import copy_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.residency import Stay, TaskClock
from twinstream.planner.traffic import traffic_of
from twinstream.planner.uses import UnitMap
from twinstream.schedule.chain import Chain


@dataclass(frozen=True)
class QueueModel:
    """Each direction as a queue that copies one unit after the other, compute never waiting.

    A load is issued early enough that all loads after it can still be in time, an offload gets
    until all before it are through; at most `longest_ns` of compute time each way.
    """

    chain: Chain
    units: UnitMap
    machine: Machine
    longest_ns: float

    def widened(self, stays: Sequence[Stay], clock: TaskClock) -> list[Stay]:
        """The stays with room for their copies; stays of the same content that meet are joined."""
        traffic = traffic_of(self.chain, self.units, stays)
        begins = self._begins(stays, traffic.loads, clock)
        ends = self._ends(stays, traffic.stores, clock)
        by_unit: dict[str, list[Stay]] = {}
        for stay, begin, end in zip(stays, begins, ends, strict=True):
            mine = by_unit.setdefault(stay.unit, [])
            mine.append(replace(stay, begin=begin, end=end))
        return [stay for found in by_unit.values() for stay in _joined(found)]

    def _begins(
        self, stays: Sequence[Stay], loads: Mapping[int, Mapping[str, int]], clock: TaskClock
    ) -> list[int]:
        begins = [stay.begin for stay in stays]
        loading = [i for i, leaves in loads.items() if leaves]
        next_start_ns = float("inf")
        for i in sorted(loading, key=lambda i: -stays[i].uses[0].position):
            due = stays[i].uses[0].position
            size = self._bytes(stays[i], loads[i])
            end_ns = min(clock.start_ns[due], next_start_ns)
            next_start_ns = max(
                end_ns - copy_alone_ns(size, "h2d", self.machine),
                clock.start_ns[due] - self.longest_ns,
            )
            begins[i] = clock.position_before(due, clock.start_ns[due] - next_start_ns)
        return begins

    def _ends(
        self,
        stays: Sequence[Stay],
        stores: Mapping[int, Mapping[int, Mapping[str, int]]],
        clock: TaskClock,
    ) -> list[int]:
        ends = [stay.end for stay in stays]
        free_ns = 0.0
        for position in sorted(stores):
            ready_ns = clock.start_ns[position + 1]
            for i, leaves in stores[position].items():
                size = self._bytes(stays[i], leaves)
                free_ns = max(free_ns, ready_ns) + copy_alone_ns(size, "d2h", self.machine)
                free_ns = min(free_ns, ready_ns + self.longest_ns)
                drained = clock.position_after(position, free_ns - ready_ns)
                ends[i] = max(ends[i], drained)
        return ends

    def _bytes(self, stay: Stay, leaves: Mapping[str, int]) -> int:
        unit = self.units.units[stay.unit]
        return max(1, unit.tensor.size_bytes * len(leaves) // len(unit.leaves))


def _joined(stays: Sequence[Stay]) -> list[Stay]:
    """One unit's stays in order: joined where they meet with the same content, else kept apart."""
    joined: list[Stay] = []
    for stay in stays:
        last = joined[-1] if joined else None
        if last is not None and stay.begin <= last.end and last.goes_on_in(stay):
            joined[-1] = replace(
                last, end=stay.end, uses=(*last.uses, *stay.uses), leaves=stay.leaves
            )
            continue
        if last is not None and stay.begin < last.end:
            cut = max(last.uses[-1].position + 1, min(last.end, stay.uses[0].position))
            joined[-1] = replace(last, end=cut)
            stay = replace(stay, begin=max(stay.begin, joined[-1].end))
        joined.append(stay)
    return joined
