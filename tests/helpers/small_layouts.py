"""A residency with copies at chosen steps, as a schedule: its slots, its ops and their waits."""

from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from typing import NamedTuple

from tests.helpers.small_residencies import Residency, Stay, uses_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.chain import Chain
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy, Op, Operand, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Slot, Tier
from twinstream.schedule.workload import MachineRef

_PACKINGS = 50  # orders tried when placing what is alive together


class CopyOf(NamedTuple):
    """A load of a stay or its store to a home, right before step `before` (0: of the next pass)."""

    stay: int
    home: int
    loads: bool
    before: int


class _Arc(NamedTuple):
    """Places in the body, cyclically, from `start` on: `length` more."""

    start: int
    length: int
    size_bytes: int


def made_at(stay: Stay) -> int:
    return [use.step for use in stay.uses if use.makes][-1]


class Layout:
    """Issue order of a residency with its copies, and what is alive when."""

    def __init__(self, chain: Chain, residency: Residency, copies: Sequence[CopyOf]) -> None:
        self.chain, self.residency = chain, residency
        self.items: list[int | CopyOf] = []
        num_steps = len(residency.steps)
        for step in range(num_steps):
            self.items.append(step)
            self.items += [copy for copy in copies if copy.before == (step + 1) % num_steps]
        self.place = {item: i for i, item in enumerate(self.items)}
        self.loads = {copy.stay: copy for copy in copies if copy.loads}
        self.stores = {copy.home: copy for copy in copies if not copy.loads}
        self.sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
        self.scratch = [
            (step, operand.tensor)
            for step, task in enumerate(residency.steps)
            for operand in task.operands
            if operand.mode == "scratch"
        ]

    def schedule(self, machine: Machine, caps: Caps) -> RankSchedule | None:
        """None where a copy would be loaded before it is stored, or the caps do not hold."""
        if not all(map(self._in_order, range(len(self.residency.homes)))):
            return None
        device, host = self._device_arcs(), self._host_arcs()
        scratch = [_Arc(self.place[step], 0, self.sizes[name]) for step, name in self.scratch]
        count = len(self.items)
        device_at = _packed([*device, *scratch], count, caps.arena_bytes("device"))
        host_at = _packed(host, count, caps.arena_bytes("host"))
        if device_at is None or host_at is None:
            return None
        slots = _slots(device_at, [*device, *scratch], DEVICE)
        homes = _slots(host_at, host, HOST)
        all_slots = tuple(dict.fromkeys([*slots, *homes]))
        ops = derive_waits(tuple(self._ops(slots, homes)), self.chain.tensors, all_slots)
        used = {op.call for op in ops if isinstance(op, Compute)}
        chain = self.chain
        return RankSchedule(
            tensors=chain.tensors,
            slots=all_slots,
            calls={name: call for name, call in chain.calls.items() if name in used},
            ops=ops,
            carried=tuple(self._carried(slots, device, homes, host)),
            caps=caps,
            workload=chain.workload,
            model=chain.model,
            recipe=chain.recipe,
            model_flops=chain.model_flops,
            machine=MachineRef(name=machine.name, content_hash=machine.content_hash),
            policy="brute force",
        )

    def _in_order(self, number: int) -> bool:
        store = self.stores.get(number)
        if store is None:
            return True
        made = self.place[made_at(self.residency.stays[store.stay])]
        count = len(self.items)
        stored = (self.place[store] - made) % count
        loads = [self.loads[stay] for stay in self.residency.homes[number].loaded_by]
        return all(stored < (self.place[load] - made) % count for load in loads)

    def _device_arcs(self) -> list[_Arc]:
        count = len(self.items)
        stored = {copy.stay: [] for copy in self.stores.values()}
        for copy in self.stores.values():
            stored[copy.stay].append(copy)
        arcs = []
        for number, stay in enumerate(self.residency.stays):
            if stay.whole_cycle:
                arcs.append(_Arc(0, count, self.sizes[stay.tensor]))
                continue
            load = self.loads.get(number)
            start = self.place[load if load is not None else stay.uses[0].step]
            ends = [self.place[use.step] for use in stay.uses]
            ends += [self.place[copy] for copy in stored.get(number, [])]
            length = max((end - start) % count for end in ends)
            arcs.append(_Arc(start, length, self.sizes[stay.tensor]))
        return arcs

    def _host_arcs(self) -> list[_Arc]:
        count = len(self.items)
        arcs = []
        for number, home in enumerate(self.residency.homes):
            size = self.sizes[home.tensor]
            store = self.stores.get(number)
            if store is None:
                arcs.append(_Arc(0, count, size))
                continue
            start = self.place[store]
            ends = [self.place[self.loads[stay]] for stay in home.loaded_by]
            arcs.append(_Arc(start, max((end - start) % count for end in ends), size))
        return arcs

    def _ops(self, slots: Sequence[Slot], homes: Sequence[Slot]) -> Iterator[Op]:
        slot_of = {
            (stay.tensor, use.step): slots[number].slot_id
            for number, stay in enumerate(self.residency.stays)
            for use in stay.uses
        }
        of_scratch = slots[len(self.residency.stays) :]
        for (step, tensor), slot in zip(self.scratch, of_scratch, strict=True):
            slot_of[tensor, step] = slot.slot_id
        for item in self.items:
            if not isinstance(item, int):
                yield self._copy(item, slots[item.stay].slot_id, homes[item.home].slot_id)
                continue
            task = self.residency.steps[item]
            operands = tuple(
                Operand(
                    **dict(o),
                    slot=slot_of[o.tensor, item],
                )
                for o in task.operands
            )
            yield Compute(
                op_id=task.task_id, stream=Stream(queue="compute"), task=task.task_id,
                call=task.call, operands=operands, label=task.label,
            )  # fmt: skip

    def _copy(self, copy: CopyOf, device: str, host: str) -> Copy:
        tensor = self.residency.stays[copy.stay].tensor
        queue, ends = ("h2d", (host, device)) if copy.loads else ("d2h", (device, host))
        return Copy(
            op_id=f"{queue}.{copy.stay}.{copy.home}", stream=Stream(queue=queue), tensor=tensor,
            version=self._version_at(tensor, self.place[copy]), source=ends[0],
            destination=ends[1],
        )  # fmt: skip

    def _version_at(self, tensor: str, place: int) -> int:
        """What the newest version is there; 0 before any is made in the pass."""
        made = [
            use.version
            for use in uses_of(self.residency.steps, tensor)
            if use.makes and self.place[use.step] < place
        ]
        return made[-1] if made else 0

    def _carried(
        self,
        slots: Sequence[Slot],
        device: Sequence[_Arc],
        homes: Sequence[Slot],
        host: Sequence[_Arc],
    ) -> Iterator[Carried]:
        persistent = set(self.chain.persistent)
        for number, stay in enumerate(self.residency.stays):
            if stay.tensor in persistent and self._crosses(device[number]):
                yield Carried(tensor=stay.tensor, slot=slots[number].slot_id)
        for number, home in enumerate(self.residency.homes):
            if home.tensor in persistent and self._crosses(host[number]):
                yield Carried(tensor=home.tensor, slot=homes[number].slot_id)

    def _crosses(self, arc: _Arc) -> bool:
        return arc.start + arc.length >= len(self.items)


def _meet(one: _Arc, other: _Arc, count: int) -> bool:
    return (other.start - one.start) % count <= one.length or (
        one.start - other.start
    ) % count <= other.length


def _packed(arcs: Sequence[_Arc], count: int, cap_bytes: int | None) -> list[int] | None:
    """Offsets at which arcs that meet do not overlap, below the cap; None where none are found."""
    limit = sum(arc.size_bytes for arc in arcs) if cap_bytes is None else cap_bytes
    meets = [
        [j for j, other in enumerate(arcs) if j != i and _meet(arc, other, count)]
        for i, arc in enumerate(arcs)
    ]
    for place in range(count):
        there = _Arc(place, 0, 0)
        if sum(arc.size_bytes for arc in arcs if _meet(arc, there, count)) > limit:
            return None
    first = sorted(range(len(arcs)), key=lambda i: (-arcs[i].length, -arcs[i].size_bytes))
    for order in islice(permutations(first), _PACKINGS):
        offsets = _first_fit(order, arcs, meets)
        if all(low + arc.size_bytes <= limit for low, arc in zip(offsets, arcs, strict=True)):
            return offsets
    return None


def _first_fit(
    order: Sequence[int], arcs: Sequence[_Arc], meets: Sequence[Sequence[int]]
) -> list[int]:
    offsets = [-1] * len(arcs)
    for i in order:
        taken = sorted(
            (offsets[j], offsets[j] + arcs[j].size_bytes) for j in meets[i] if offsets[j] >= 0
        )
        low = 0
        for begin, end in taken:
            if begin - low >= arcs[i].size_bytes:
                break
            low = max(low, end)
        offsets[i] = low
    return offsets


def _slots(offsets: Sequence[int], arcs: Sequence[_Arc], tier: Tier) -> list[Slot]:
    return [
        Slot(
            slot_id=f"{tier.kind}.{offset}.{arc.size_bytes}",
            tier=tier,
            offset_bytes=offset,
            size_bytes=arc.size_bytes,
        )
        for offset, arc in zip(offsets, arcs, strict=True)
    ]
