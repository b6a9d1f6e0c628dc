"""Ops of one class of ranks as they are issued, with the waits that their slots ask for."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from twinstream.schedule.cost import Work
from twinstream.schedule.ops import (
    Communicate,
    Compute,
    KernelCall,
    Label,
    Mode,
    Op,
    Operand,
    Stream,
)
from twinstream.schedule.tensors import DEVICE, Carried, Role, Slot, Tensor

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "recv"]


@dataclass(eq=False, slots=True)
class BufferSlot:
    """A slot, with who used it last: the writer, and by queue the last reader since."""

    slot: str
    size_bytes: int
    role: Role
    writer: int = -1
    readers: dict[int, int] = field(default_factory=dict)
    opening: dict[tuple[int, bool], int] = field(default_factory=dict)
    written: bool = False


@dataclass(eq=False, slots=True)
class Buffer:
    """A tensor in a slot, and its newest version."""

    tensor: str
    place: BufferSlot
    version: int = 0


_MOST_QUEUES = 16
Use = tuple[str, Buffer, Mode]
Over = tuple[tuple[str, ...], str]  # axes of the mesh, and the queue
Ends = tuple[Buffer, Buffer, Buffer]  # what a chunk was given, its output's gradient, its input's


class StageBuilder:
    """Collects what a class of ranks does in a step.

    A slot is taken from a pool of slots of one kind and given back; the slot that has been free
    longest is taken first. Ops of other queues that still use it are waited for, within a pass
    and from pass to pass.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.calls: dict[str, KernelCall] = {}
        self.ops: list[Op] = []
        self.carried: list[Carried] = []
        self.places: list[BufferSlot] = []
        self._free: dict[str, deque[BufferSlot]] = {}
        self._queues: dict[str, int] = {}
        self._streams: list[Stream] = []
        self._queue_of: list[int] = []
        self._clocks: list[list[int]] = []
        self._done: list[list[int]] = []
        self._sequence: dict[tuple[object, ...], int] = {}
        self._known: dict[str, Buffer] = {}
        self._labels: dict[tuple[object, ...], Label] = {}

    def persist(self, tensor: str, size_bytes: int, role: Role, dtype: str) -> Buffer:
        """A tensor carried from step to step, in a slot of its own."""
        held = self._new(tensor, self._slot(tensor, size_bytes, role), dtype)
        self.carried.append(Carried(tensor=tensor, slot=held.place.slot))
        return held

    def allocate(
        self, pool: str, size_bytes: int, role: Role, dtype: str, tensor: str | None = None,
        spare: int = 0,
    ) -> Buffer:  # fmt: skip
        """A slot of a pool; with a `tensor` of its own, else the slot's.

        A free one is taken only if `spare` more are free: what was given back last may still be
        on its way.
        """
        free = self._free.setdefault(pool, deque())
        if len(free) > spare:
            place = free.popleft()
        else:
            place = self._slot(f"{pool}.{self._count(pool)}", size_bytes, role)
        return self._new(tensor or place.slot, place, dtype)

    def free(self, pool: str, held: Buffer) -> None:
        """The tensor is not needed any more."""
        self._free[pool].append(held.place)

    def label(
        self, kind: str, layer: int | None = None, chunk: int | None = None,
        microbatch: int | None = None,
    ) -> Label:  # fmt: skip
        """Of an op; those of one kind and place are one object."""
        key = kind, layer, chunk, microbatch
        if key not in self._labels:
            self._labels[key] = Label(kind=kind, layer=layer, chunk=chunk, round=microbatch)
        return self._labels[key]

    def compute(
        self, op_id: str, call: str, works: tuple[Work, ...], uses: Sequence[Use], label: Label
    ) -> None:
        """A task; ops of one call do the same work."""
        if call not in self.calls:
            self.calls[call] = KernelCall(kernel=f"cluster.{label.kind}", attributes={}, cost=works)
        queue = self._queue("compute")
        waits, operands = self._used(queue, uses)
        self.ops.append(
            Compute.made(
                op_id=op_id, stream=self._streams[queue], waits=waits, waits_previous=(),
                kind="compute", task=op_id, call=call, operands=operands, label=label,
            )
        )  # fmt: skip

    def communicate(
        self, op_id: str, collective: Collective, over: Over, uses: Sequence[Use], label: Label,
        shift: int = 0,
    ) -> None:  # fmt: skip
        """One side of an exchange."""
        axes, queue = over
        number = self._queue(queue)
        waits, operands = self._used(number, uses)
        key: tuple[object, ...] = (axes, shift, collective) if shift else (axes, queue)
        sequence = self._sequence[key] = self._sequence.get(key, -1) + 1
        self.ops.append(
            Communicate.made(
                op_id=op_id, stream=self._streams[number], waits=waits, waits_previous=(),
                kind="communicate", collective=collective, axes=axes, shift=shift,
                sequence=sequence, operands=operands, reduction="library", label=label,
            )
        )  # fmt: skip

    def finish(self) -> None:
        """Close the loop: what the next pass begins with waits for what this one ended with."""
        known: dict[tuple[int, int], int] = {}
        openings = [
            (at, queue, writes, place)
            for place in self.places
            for (queue, writes), at in place.opening.items()
        ]
        openings.sort(key=lambda one: one[:3])
        added: dict[int, dict[int, int]] = {}
        for at, queue, writes, place in openings:
            last = [place.writer, *(place.readers.values() if writes else ())]
            for position in last:
                other = self._queue_of[position] if position >= 0 else queue
                if other != queue and position > known.get((queue, other), -1):
                    known[queue, other] = position
                    added.setdefault(at, {})[other] = position
        for at, by_queue in added.items():
            before = tuple(self.ops[position].op_id for position in sorted(by_queue.values()))
            self.ops[at] = self.ops[at].model_copy(update={"waits_previous": before})

    def slots(self) -> tuple[Slot, ...]:
        """All slots, one behind the other, aligned."""
        found, end = [], 0
        for place in self.places:
            found.append(
                Slot(slot_id=place.slot, tier=DEVICE, offset_bytes=end, size_bytes=place.size_bytes)
            )
            end += -(-place.size_bytes // DEVICE.alignment_bytes) * DEVICE.alignment_bytes
        return tuple(found)

    def _slot(self, slot: str, size_bytes: int, role: Role) -> BufferSlot:
        place = BufferSlot(slot, max(1, size_bytes), role)
        self.places.append(place)
        return place

    def _count(self, pool: str) -> int:
        key = ("slot", pool)
        self._sequence[key] = self._sequence.get(key, -1) + 1
        return self._sequence[key]

    def _new(self, tensor: str, place: BufferSlot, dtype: str) -> Buffer:
        held = self._known.get(tensor)
        if held is not None and held.place is place:
            return held
        known, held = held, Buffer(tensor, place)
        self._known[tensor] = held
        if known is None:
            self.tensors.append(
                Tensor.made(
                    tensor_id=tensor, size_bytes=place.size_bytes, role=place.role, dtype=dtype,
                    shape=(place.size_bytes,),
                    parent=None, offset_bytes=0,
                )
            )  # fmt: skip
        return held

    def _queue(self, name: str) -> int:
        number = self._queues.get(name)
        if number is None:
            number = self._queues[name] = len(self._streams)
            assert number < _MOST_QUEUES
            self._streams.append(Stream(queue=name))
            self._done.append([-1] * _MOST_QUEUES)
        return number

    def _used(self, queue: int, uses: Sequence[Use]) -> tuple[tuple[str, ...], tuple[Operand, ...]]:
        """What an op that is issued now waits for, and its operands; takes note of its uses."""
        at, queue_of, wanted, found = len(self.ops), self._queue_of, dict[int, int](), []
        queue_of.append(queue)
        for name, held, mode in uses:
            place, version = held.place, held.version
            if not place.written:  # what comes after the pass's first write waits for that
                place.opening.setdefault((queue, mode != "read"), at)
            if (position := place.writer) >= 0 and (other := queue_of[position]) != queue:
                wanted[other] = max(position, wanted.get(other, -1))
            if mode == "read":
                place.readers[queue] = at
            else:
                for other, position in place.readers.items():
                    if other != queue:
                        wanted[other] = max(position, wanted.get(other, -1))
                place.writer, place.readers, place.written = at, {}, True
                if mode == "scratch":
                    version = 0
                else:
                    held.version += 1
                    version += mode == "write"
            found.append(
                Operand.made(
                    name=name, tensor=held.tensor, version=version, mode=mode, num_parts=None,
                    slot=place.slot,
                )
            )  # fmt: skip
        return self._needed(queue, at, wanted), tuple(found)

    def _needed(self, queue: int, at: int, wanted: dict[int, int]) -> tuple[str, ...]:
        """Of these ops those that nothing else has made sure of; vector clocks by position."""
        clock = self._done[queue].copy()
        self._done[queue] = clock
        self._clocks.append(clock)
        needed = []
        for other, position in sorted(wanted.items(), key=_newest_first):
            if clock[other] < position:
                needed.append(position)
                clock[:] = map(max, clock, self._clocks[position])
        clock[queue] = at
        return tuple([self.ops[position].op_id for position in sorted(needed)])


def _newest_first(item: tuple[int, int]) -> int:
    return -item[1]
