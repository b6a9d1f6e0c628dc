"""The cost of an op in virtual time: a fixed delay, then a flow over shared resources."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

from twinstream.hardware_profiles.cost import (
    call_alone_ns,
    copy_alone_ns,
    device_copy_alone_ns,
    work_time,
)
from twinstream.hardware_profiles.memories import (
    DISK_READS,
    DISK_WRITES,
    DRIVE,
    MemoryLink,
    drive_ns_per_byte,
)
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import SeveralRanksError
from twinstream.schedule.ops import Communicate, Compute, Copy, Feed, Fetch, Op
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.simulator.flows import Flow


@dataclass(frozen=True, slots=True)
class OpCost:
    """`fixed_ns` of latency that nothing shares, then `flow` (None: nothing but the latency)."""

    fixed_ns: int
    flow: Flow | None


class CostModel(Protocol):
    """Prices ops. `wait_ns` is added once to an op that waits for other streams."""

    @property
    def wait_ns(self) -> int: ...

    @property
    def capacity(self) -> Mapping[str, float]: ...

    def cost(self, op: Op) -> OpCost: ...


class MachineCosts:
    """Prices ops of a schedule on a machine.

    A kernel sequence is one flow: alone it takes the sum of its kernels' times; it uses compute
    all that time and its HBM bytes evenly over it. A copy uses its direction of the link, the
    link's joint limit, HBM and host DRAM; one inside the device reads and writes HBM; a read or a
    write of a disk uses that and host DRAM, and the drive's time where both are done. What the
    host fills or takes uses host DRAM; what it computes uses the host CPU and its bytes of host
    DRAM evenly over its time alone.

    Args:
        network: more resources of a rank, bytes per ns, on which its exchanges draw.
    """

    def __init__(
        self, schedule: RankSchedule, machine: Machine, network: Mapping[str, float] | None = None
    ) -> None:
        self._schedule, self._machine = schedule, machine
        self.wait_ns = round(machine.number("event_wait_latency_ns"))
        self.capacity: Mapping[str, float] = {"compute": 1.0} | {
            resource: machine.rate(field) / 1e9
            for resource, field in (
                ("hbm", "hbm_bytes_per_s"),
                ("h2d", "pcie_h2d_bytes_per_s"),
                ("d2h", "pcie_d2h_bytes_per_s"),
                ("pcie", "pcie_duplex_bytes_per_s"),
                ("host_dram", "host_dram_bytes_per_s"),
            )
        }
        if any(call.processor == "host" for call in schedule.calls.values()):
            self.capacity = {**self.capacity, "host_compute": 1.0}
        self.capacity = {**self.capacity, **(network or {})}
        self._disk_links = _disk_links(schedule)
        for link in self._disk_links.values():
            self.capacity = {**self.capacity, link.name: machine.rate(link.rate_field) / 1e9}
        if len(self._disk_links) > 1:
            self.capacity = {**self.capacity, DRIVE: machine.number("disk_overlap")}
        self._access_map = AccessMap(schedule.tensors, schedule.slots)
        self._tiers = {slot.slot_id: slot.tier.kind for slot in schedule.slots}
        self._calls = {name: self._call_cost(name) for name in schedule.calls}
        self._copies: dict[tuple[str, int], OpCost] = {}

    def cost(self, op: Op) -> OpCost:
        match op:
            case Compute():
                return self._calls[op.call]
            case Copy():
                places = self._tiers[op.source], self._tiers[op.destination]
                return self._copy_cost(*places, self._copied_bytes(op))
            case Feed() | Fetch():
                return self._host_cost(self._copied_bytes(op))
            case Communicate():
                raise SeveralRanksError(op.op_id)
            case _:
                assert_never(op)

    def _copied_bytes(self, op: Copy | Feed | Fetch) -> int:
        """Bytes that an op moves: a tensor, or the first parts of one."""
        num_parts = op.num_parts if isinstance(op, Copy) else None
        low, high = self._access_map.extent(op.tensor, num_parts)
        return high - low

    def _call_cost(self, name: str) -> OpCost:
        call = self._schedule.calls[name]
        works = call.cost
        if call.processor == "host":
            host_ns = call_alone_ns(call, self._machine)
            dram_bytes = float(sum(work.host_dram_bytes for work in works))
            return _op_cost(0, host_ns, (("host_compute", host_ns), ("host_dram", dram_bytes)))
        times = [work_time(work, self._machine) for work in works]
        alone_ns = sum(max(t.compute_ns, t.memory_ns) for t in times)
        hbm_bytes = sum(work.hbm_bytes for work in works)
        amounts = (("compute", alone_ns), ("hbm", float(hbm_bytes)))
        return _op_cost(sum(t.launch_ns for t in times), alone_ns, amounts)

    def _copy_cost(self, source: str, destination: str, size_bytes: int) -> OpCost:
        direction: Literal["h2d", "d2h"] = "d2h" if destination == "host" else "h2d"
        link = self._disk_links.get((source, destination))
        inside = source == destination == "device"
        key = ("d2d" if inside else link.name if link else direction, size_bytes)
        if key not in self._copies:
            size = float(size_bytes)
            if inside:
                latency_ns = self._machine.number("launch_latency_ns")
                alone_ns = device_copy_alone_ns(size_bytes, self._machine)
                amounts: tuple[tuple[str, float], ...] = (("hbm", 2.0 * size),)
            elif link is not None:
                latency_ns = self._machine.number(link.latency_field)
                alone_ns = copy_alone_ns(size_bytes, link.name, self._machine)
                amounts = tuple((name, size) for name, _ in link.resources)
                if DRIVE in self.capacity:
                    amounts += ((DRIVE, size * drive_ns_per_byte(self._machine, link)),)
            else:
                latency_ns = self._machine.number("copy_latency_ns")
                alone_ns = copy_alone_ns(size_bytes, direction, self._machine)
                both = size * self._machine.duplex_weights()[direction == "d2h"]
                amounts = ((direction, size), ("pcie", both), ("hbm", size), ("host_dram", size))
            self._copies[key] = _op_cost(latency_ns, alone_ns - latency_ns, amounts)
        return self._copies[key]

    def _host_cost(self, size_bytes: int) -> OpCost:
        alone_ns = size_bytes / self.capacity["host_dram"]
        launch_ns = self._machine.number("launch_latency_ns")
        return _op_cost(launch_ns, alone_ns, (("host_dram", float(size_bytes)),))


def _disk_links(schedule: RankSchedule) -> dict[tuple[str, str], MemoryLink]:
    """By kinds of memory, from and to: the links to and from a disk that a schedule uses."""
    kinds = {slot.slot_id: slot.tier.kind for slot in schedule.slots}
    used = {(kinds[o.source], kinds[o.destination]) for o in schedule.ops if isinstance(o, Copy)}
    links = {(link.source, link.destination): link for link in (DISK_READS, DISK_WRITES)}
    return {way: link for way, link in links.items() if way in used}


def _op_cost(latency_ns: float, alone_ns: float, amounts: tuple[tuple[str, float], ...]) -> OpCost:
    """No flow where nothing takes time: all its resources are unconstrained."""
    return OpCost(round(latency_ns), Flow(alone_ns, amounts) if alone_ns > 0 else None)
