"""Freeze a task sequence and its residencies into a schedule.

The walk is in task order, as a runtime would issue: before a task the loads whose bytes become
free there, in order of need; the task; then the offload of every content that became final. A
load of what is at home on a disk reads it into the next slot of a ring in host memory first, and an
offload of such is written there from a slot of a second ring. A
task of the host CPU works on what is at home in host memory; then what it made is copied to where
it is needed on the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.rounds import Folding
from twinstream.planner.lifetimes.uses import Unit
from twinstream.planner.pack.placement import Placement
from twinstream.schedule.chain import Input, Output, Task
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import (
    DISK_READ,
    DISK_WRITE,
    HOST_COMPUTE,
    Compute,
    Copy,
    Feed,
    Fetch,
    Op,
    Operand,
    Stream,
    TaskOperand,
)
from twinstream.schedule.tensors import DEVICE, DISK, HOST, Carried, Slot, Tier
from twinstream.schedule.workload import MachineRef

COMPUTE = Stream(queue="compute")
HOST_STREAM = Stream(queue=HOST_COMPUTE)
H2D = Stream(queue="h2d")
H2D_INPUTS = Stream(queue="h2d_inputs")  # so that tokens do not wait behind layers in one queue
H2D_UPDATES = Stream(queue="h2d_updates")  # so that loads do not wait behind the host's updates
D2H = Stream(queue="d2h")
D2H_DISK = Stream(queue="d2h_disk")  # so that others do not wait for writes of the disk
DISK_READS = Stream(queue=DISK_READ)
DISK_WRITES = Stream(queue=DISK_WRITE)
HOST_QUEUE = Stream(queue="host")


@dataclass(frozen=True)
class Emitted:
    """The schedule that a placement was written out as.

    Attributes:
        schedule: the ops and slots.
        placement: what it was made from.
        residency_of_copy: by the id of a copy, the number of the residency that it serves.
        positions: by op, the position of the task before or after which it is issued.
    """

    schedule: RankSchedule
    placement: Placement
    residency_of_copy: Mapping[str, int]
    positions: Sequence[int]


def emitted(placement: Placement, machine: Machine, caps: Caps, policy: str) -> Emitted:
    """Write out a placement as a schedule, with every wait that its choices imply."""
    emission = _Emission(placement)
    ops = tuple(emission.run())
    slots = tuple(emission.slots.values())
    chain = placement.chain
    used_calls = {op.call for op in ops if isinstance(op, Compute)}
    schedule = RankSchedule(
        tensors=chain.tensors,
        slots=slots,
        calls={name: call for name, call in chain.calls.items() if name in used_calls},
        ops=derive_waits(ops, chain.tensors, slots),
        carried=tuple(emission.carried()),
        caps=with_library_memory(caps, chain),
        workload=chain.workload,
        model=chain.model,
        recipe=chain.recipe,
        model_flops=chain.model_flops,
        machine=MachineRef(name=machine.name, content_hash=machine.content_hash),
        policy=policy,
    )
    return Emitted(schedule, placement, emission.residency_of_copy, emission.positions)


@dataclass
class _Ring:
    """Bytes of host memory that are taken one after the other, and from the beginning again.

    Every round begins with the first, so that rounds are alike.
    """

    begins: int
    size_bytes: int
    _round: int = 0
    _next: int = 0

    def take(self, size_bytes: int, round_: int) -> int:
        """Return where the next so many bytes begin in the ring."""
        assert size_bytes <= self.size_bytes, "a ring has room for the largest"
        if round_ != self._round or self._next + size_bytes > self.size_bytes:
            self._round, self._next = round_, 0
        taken = self._next
        self._next += align_up(size_bytes)
        return taken


@dataclass(frozen=True)
class _RingLoad:
    """A load through a slot of the ring: its reads, and the ids of its copies to the device."""

    slot: Slot
    reads: Sequence[Copy]
    copies: list[str]

    def overlaps(self, other: "_RingLoad") -> bool:
        """Whether both lie on the same bytes."""
        mine, theirs = self.slot, other.slot
        return (
            mine.offset_bytes < theirs.offset_bytes + theirs.size_bytes
            and theirs.offset_bytes < mine.offset_bytes + mine.size_bytes
        )


class _Emission:
    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.units = placement.units
        self.traffic = placement.traffic
        self.slots: dict[str, Slot] = {}
        self.homes: dict[str, str] = {}
        self.residency_of_copy: dict[str, int] = {}
        self.positions: list[int] = []
        self._inputs: dict[tuple[str, int], Input] = {
            (i.tensor, i.version): i for i in placement.chain.inputs
        }
        self._outputs: dict[tuple[str, int], Output] = {
            (o.tensor, o.version): o for o in placement.chain.outputs
        }
        self._slot_of_residency = [
            self._device_slot(residency, offset)
            for residency, offset in zip(placement.residencies, placement.offsets, strict=True)
        ]
        self._numbers: dict[str, int] = {}
        self._position = 0
        self._ring_loads: dict[int, list[_RingLoad]] = {}
        self._folding = Folding.of(placement.chain, placement.tasks)
        self._place_homes()

    def run(self) -> list[Op]:
        ops: list[Op] = []
        starting: dict[int, list[int]] = {}
        slot_at: list[dict[str, str]] = [{} for _ in self.placement.tasks]
        for index, residency in enumerate(self.placement.residencies):
            begin = residency.begin if residency.ahead is None else residency.ahead[0]
            starting.setdefault(begin, []).append(index)
            for use in residency.uses:
                slot_at[use.position][residency.unit] = self._slot_of_residency[index]
        for position, task in enumerate(self.placement.tasks):
            self._position = position
            due = starting.get(position, [])
            due.sort(key=self._due)
            for index in due:
                ops += self._load(index)
            if self._on_host(task):
                ops += self._host_compute(task)
            else:
                ops.append(self._compute(task, COMPUTE, slot_at[position]))
            for index, leaves in self.traffic.stores.get(position, {}).items():
                ops += self._store(index, leaves)
            self.positions += [position] * (len(ops) - len(self.positions))
        return self._reads_ahead(ops)

    def _reads_ahead(self, ops: list[Op]) -> list[Op]:
        """Issue each read where its slot of the ring is free, behind the copy that empties it, so
        that who issues ops need not have waited for the reads before; no earlier than its round,
        and behind the write of what it reads."""
        where = {op.op_id: at for at, op in enumerate(ops)}
        written = {  # by content, behind its write
            (leaf, op.version): at + 1
            for at, op in enumerate(ops)
            if isinstance(op, Copy) and op.stream == DISK_WRITES
            for leaf in self.units.leaves(op.tensor, None)
        }
        rounds = [self._folding.round_of(position) for position in self.positions]
        issued: dict[int, list[int]] = {}  # reads, by the place that they are issued at
        places = list(self.positions)
        for round_, loads in self._ring_loads.items():
            first = rounds.index(round_)
            for number, load in enumerate(loads):
                emptied = next((one for one in loads[:number][::-1] if load.overlaps(one)), None)
                free = first if emptied is None else where[emptied.copies[-1]] + 1
                for read in load.reads:
                    leaves = self.units.leaves(read.tensor, None)
                    place = max(free, *(written.get((one, read.version), 0) for one in leaves))
                    issued.setdefault(place, []).append(where[read.op_id])
                    places[where[read.op_id]] = places[max(first, place - 1)]
        gone = {at for reads in issued.values() for at in reads}
        order: list[int] = []
        for place in range(len(ops) + 1):
            order += issued.get(place, ())
            if place < len(ops) and place not in gone:
                order.append(place)
        self.positions = [places[at] for at in order]
        return [ops[at] for at in order]

    def _due(self, index: int) -> tuple[int, int]:
        """Return when a residency's content is first used, and its number."""
        residency = self.placement.residencies[index]
        later = 0 if residency.ahead is None else len(self.placement.tasks)
        return residency.uses[0].position + later, index

    def carried(self) -> list[Carried]:
        """Persistent units: on the device where a residency leaves, at home where that is valid.

        Where one is loaded for the pass after, that copy may still be on its way.
        """
        held = {s.unit: i for i, s in enumerate(self.placement.residencies) if s.leaves or s.ahead}
        found = []
        for name, unit in self.units.units.items():
            if not unit.persistent:
                continue
            if name in held:
                found.append(Carried(tensor=name, slot=self._slot_of_residency[held[name]]))
            if name not in held or name in self.traffic.initially_loaded:
                found.append(Carried(tensor=name, slot=self.homes[name]))
        return found

    def _device_slot(self, residency: Residency, offset: int) -> str:
        tensor = self.units.units[residency.unit].tensor
        origin = tensor.offset_bytes
        slot_id = f"device.{offset}.{tensor.size_bytes}" + (f".{origin}" if origin else "")
        if slot_id not in self.slots:
            self.slots[slot_id] = Slot(
                slot_id=slot_id,
                tier=DEVICE,
                offset_bytes=offset,
                size_bytes=tensor.size_bytes,
                origin_bytes=origin,
            )
        return slot_id

    def _place_homes(self) -> None:
        on_disk = self.placement.on_disk
        begins = self._place(HOST, self.placement.host_units)
        self._read_ring = _Ring(begins, on_disk.read_ring_bytes)
        self._write_ring = _Ring(begins + on_disk.read_ring_bytes, on_disk.write_ring_bytes)
        self._place(DISK, on_disk.units)
        self._on_disk = {unit.unit_id for unit in on_disk.units}

    def _place(self, tier: Tier, units: Sequence[Unit]) -> int:
        """Give units homes one after the other, and return where the last one ends."""
        offset = 0
        for unit in units:
            slot_id = f"{tier.kind}.{unit.unit_id}"
            self.homes[unit.unit_id] = slot_id
            self.slots[slot_id] = Slot(
                slot_id=slot_id,
                tier=tier,
                offset_bytes=offset,
                size_bytes=unit.tensor.size_bytes,
                origin_bytes=unit.tensor.offset_bytes,
            )
            offset += align_up(unit.tensor.size_bytes, tier.alignment_bytes)
        return offset

    def _read(self, index: int, unit: str, copied: Sequence[tuple[str, int]]) -> _RingLoad:
        """Read a unit into the next slot of the ring."""
        slot = self._ring_slot(self._read_ring, unit)
        reads = [
            Copy(
                op_id=self._copy_id("disk", name, index), stream=DISK_READS, tensor=name,
                version=version, source=self.homes[unit], destination=slot.slot_id,
            )
            for name, version in copied
        ]  # fmt: skip
        loads = self._ring_loads.setdefault(self._round, [])
        loads.append(_RingLoad(slot, reads, []))
        return loads[-1]

    @property
    def _round(self) -> int:
        return self._folding.round_of(self._position)

    def _ring_slot(self, ring: _Ring, unit: str) -> Slot:
        """The next slot of a ring, for a unit."""
        tensor = self.units.units[unit].tensor
        offset = ring.begins + ring.take(tensor.size_bytes, self._round)
        slot_id = f"ring.{offset}.{unit}"
        self.slots[slot_id] = Slot(
            slot_id=slot_id,
            tier=HOST,
            offset_bytes=offset,
            size_bytes=tensor.size_bytes,
            origin_bytes=tensor.offset_bytes,
        )
        return self.slots[slot_id]

    def _on_host(self, task: Task) -> bool:
        return self.placement.chain.calls[task.call].processor == "host"

    def _host_compute(self, task: Task) -> list[Op]:
        """The task on what is at home, and copies of what it makes into residencies that go on."""
        ops: list[Op] = []
        for operand in task.operands:
            if operand.mode == "read":
                ops += self._fed(operand.tensor, operand.version, self.homes[self._unit(operand)])
        ops.append(self._compute(task, HOST_STREAM, self.homes))
        queue = H2D_UPDATES if self._loads_beside else H2D
        for index, leaves in self.traffic.refreshes.get(task.task_id, {}).items():
            ops += self._copies_in(index, leaves, queue)
        return ops

    @cached_property
    def _loads_beside(self) -> bool:
        """Whether other content than inputs is loaded."""
        loaded = (self.placement.residencies[i].unit for i, of in self.traffic.loads.items() if of)
        return any(self.units.units[unit].tensor.role != "input" for unit in loaded)

    def _compute(self, task: Task, stream: Stream, slots: Mapping[str, str]) -> Compute:
        operands = tuple(
            Operand(**vars(operand), slot=slots[self._unit(operand)]) for operand in task.operands
        )
        return Compute(
            op_id=task.task_id,
            stream=stream,
            task=task.task_id,
            call=task.call,
            operands=operands,
            label=task.label,
        )

    def _unit(self, operand: TaskOperand) -> str:
        return self.units.unit_of_leaf[self.units.leaves(operand.tensor, None)[0]]

    def _fed(self, tensor: str, version: int, home: str) -> list[Op]:
        """The host fills the home with an input when it is first asked for."""
        if (fed := self._inputs.pop((tensor, version), None)) is None:
            return []
        return [
            Feed(
                op_id=f"feed.{tensor}.{version}", stream=HOST_QUEUE, tensor=tensor,
                version=version, slot=home, source=fed.source, index=fed.index,
            )
        ]  # fmt: skip

    def _load(self, index: int) -> list[Op]:
        traffic = self.traffic
        return self._copies_in(index, traffic.ahead.get(index) or traffic.loads.get(index, {}))

    def _copies_in(self, index: int, leaves: dict[str, int], queue: Stream = H2D) -> list[Op]:
        unit = self.placement.residencies[index].unit
        stream = H2D_INPUTS if self.units.units[unit].tensor.role == "input" else queue
        ops: list[Op] = []
        copied, load = self._copied(unit, leaves), None
        if unit in self._on_disk and copied:
            load = self._read(index, unit, copied)
            ops += load.reads
        for tensor, version in copied:
            home = self.homes[unit] if load is None else load.slot.slot_id
            slot = self._slot_of_residency[index]
            ops += self._fed(tensor, version, home)
            ops.append(
                Copy(
                    op_id=self._copy_id("h2d", tensor, index), stream=stream, tensor=tensor,
                    version=version, source=home, destination=slot,
                )
            )  # fmt: skip
            if load is not None:
                load.copies.append(ops[-1].op_id)
        return ops

    def _store(self, index: int, leaves: dict[str, int]) -> list[Op]:
        unit = self.placement.residencies[index].unit
        home, slot = self.homes[unit], self._slot_of_residency[index]
        ops: list[Op] = []
        on_disk = unit in self._on_disk
        if on_disk:
            home = self._ring_slot(self._write_ring, unit).slot_id
        for tensor, version in self._copied(unit, leaves):
            ops.append(
                Copy(
                    op_id=self._copy_id("d2h", tensor, index),
                    stream=D2H_DISK if on_disk else D2H, tensor=tensor, version=version,
                    source=slot, destination=home,
                )
            )  # fmt: skip
            if on_disk:
                ops.append(
                    Copy(
                        op_id=self._copy_id("disk_write", tensor, index), stream=DISK_WRITES,
                        tensor=tensor, version=version, source=home, destination=self.homes[unit],
                    )
                )  # fmt: skip
            if wanted := self._outputs.get((tensor, version)):
                ops.append(
                    Fetch(
                        op_id=f"fetch.{tensor}.{version}", stream=HOST_QUEUE, tensor=tensor,
                        version=version, slot=home, sink=wanted.sink,
                    )
                )  # fmt: skip
        return ops

    def _copied(self, unit: str, leaves: dict[str, int]) -> list[tuple[str, int]]:
        """One copy of the whole unit where all of it moves at one version, else leaf by leaf."""
        versions = set(leaves.values())
        if len(leaves) == len(self.units.units[unit].leaves) and len(versions) == 1:
            return [(unit, versions.pop())]
        return list(leaves.items())

    def _copy_id(self, direction: str, tensor: str, residency: int) -> str:
        key = f"{direction}.{tensor}"
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        self.residency_of_copy[f"{key}.{number}"] = residency
        return f"{key}.{number}"
