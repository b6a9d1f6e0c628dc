"""Issues the ops of a random schedule one by one, keeping track of what lies where."""

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.helpers.schedule_oracle import leaves_of, span_of
from tests.helpers.sketches import tensor
from twinstream.schedule.chain import Input, Output, Recompute, Task
from twinstream.schedule.ops import (
    Compute,
    Copy,
    Feed,
    Fetch,
    Mode,
    Op,
    Operand,
    Stream,
    TaskOperand,
)
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Role, Slot, Tensor, Tier

ARENA_UNITS = {DEVICE: 7, HOST: 12}  # slots start within so many times 256 bytes
SIZES = [24, 64, 100, 256, 300, 512]


class DeadEndError(Exception):
    """The builder painted itself into a corner; start over."""


class Span(NamedTuple):
    """Bytes of a tier."""

    tier: str
    start: int
    end: int

    def overlaps(self, other: "Span") -> bool:
        return self.tier == other.tier and self.start < other.end and other.start < self.end


class Held(NamedTuple):
    """An intact leaf version in memory."""

    span: Span
    leaf: str
    version: int


class Pin(NamedTuple):
    """Bytes that an operand of the coming op reads, writes or updates."""

    span: Span
    mode: Mode


@dataclass
class Builder:
    """Grows a chain and a schedule for it side by side."""

    rng: Random
    tensors: dict[str, Tensor] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    recomputes: list[Recompute] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    persistent: list[str] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    latest: dict[str, int] = field(default_factory=dict)
    unfetched: dict[tuple[str, int], str] = field(default_factory=dict)  # leaf version: sink
    wanted: set[tuple[str, int]] = field(default_factory=set)
    pins: list[Pin] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # --- tensors, slots and what they hold

    def add_tensor(self, name: str, role: Role, *, with_parts: bool) -> None:
        offset, parts = 0, []
        for i in range(self.rng.randint(2, 3) if with_parts else 0):
            offset += self.rng.choice([0, 0, 40, 256])
            size = self.rng.choice(SIZES[:4])
            parts.append(tensor(f"{name}.{i}", size, role, name, offset))
            offset += size
        size = offset + self.rng.choice([0, 60]) if with_parts else self.rng.choice(SIZES)
        for made in [tensor(name, size, role), *parts]:
            self.tensors[made.tensor_id] = made
        for leaf in self.leaves(name):
            self.latest[leaf] = 0

    def leaves(self, name: str, num_parts: int | None = None) -> list[str]:
        return [leaf.tensor_id for leaf in leaves_of(self.tensors, name, num_parts)]

    def span(self, name: str, slot: str, num_parts: int | None = None) -> Span:
        at = self.slots[slot]
        low, high = span_of(self.tensors, name, num_parts)
        base = at.offset_bytes - at.origin_bytes
        return Span(at.tier.kind, base + low, base + high)

    def fits(self, name: str, slot: str, num_parts: int | None) -> bool:
        at = self.slots[slot]
        low, high = span_of(self.tensors, name, num_parts)
        return at.origin_bytes <= low and high <= at.origin_bytes + at.size_bytes

    def contents(self, name: str, slot: str, num_parts: int | None, version: int) -> list[Held]:
        leaves = self.leaves(name, num_parts)
        return [Held(self.span(leaf, slot), leaf, version) for leaf in leaves]

    def holders(self, name: str, num_parts: int | None, version: int) -> list[str]:
        """Slots where this version can be read."""
        held = set(self.held)
        return [
            slot for slot in self.slots
            if self.fits(name, slot, num_parts)
            and held.issuperset(self.contents(name, slot, num_parts, version))
        ]  # fmt: skip

    def place(self, name: str, num_parts: int | None, tier: Tier) -> str:
        """A slot of the tier whose bytes may be overwritten now."""
        for _ in range(30):
            known = [
                s for s in self.slots
                if self.slots[s].tier == tier and self.fits(name, s, num_parts)
            ]  # fmt: skip
            slot = self.rng.choice(known) if known and self.chance(0.6) else None
            made = slot or self._new_slot(name, num_parts, tier)
            if self.may_overwrite(self.span(name, made, num_parts)):
                return made
            if slot is None:
                del self.slots[made]
        raise DeadEndError

    def _new_slot(self, name: str, num_parts: int | None, tier: Tier) -> str:
        low, high = span_of(self.tensors, name, num_parts)
        origin = self.rng.choice([0, low, self.rng.randint(0, low)])
        slot = Slot(
            slot_id=f"{tier.kind}{len(self.slots)}",
            tier=tier,
            offset_bytes=256 * self.rng.randrange(ARENA_UNITS[tier]),
            size_bytes=high - origin + self.rng.choice([0, 0, 64, 300]),
            origin_bytes=origin,
        )
        self.slots[slot.slot_id] = slot
        return slot.slot_id

    def may_overwrite(self, span: Span) -> bool:
        """No operand of the coming op, and no last holder of something needed, lies there."""
        if any(pin.span.overlaps(span) for pin in self.pins):
            return False
        gone = [span, *(pin.span for pin in self.pins if pin.mode in ("write", "scratch"))]
        kept = {(h.leaf, h.version) for h in self.held if not any(h.span.overlaps(g) for g in gone)}
        leaves = [leaf for root in self.persistent for leaf in self.leaves(root)]
        needed = {(leaf, self.latest[leaf]) for leaf in leaves}
        return needed | self.unfetched.keys() | self.wanted <= kept

    def put(self, name: str, slot: str, num_parts: int | None, version: int | None) -> None:
        """Record a write; version None leaves garbage."""
        span = self.span(name, slot, num_parts)
        self.held = [h for h in self.held if not h.span.overlaps(span)]
        if version is not None:
            self.held += self.contents(name, slot, num_parts, version)

    def is_newest(self, leaf: str, slot: str) -> bool:
        return Held(self.span(leaf, slot), leaf, self.latest[leaf]) in self.held

    # --- ops

    def stream(self, queue: str) -> Stream:
        """Most often this one: any of the host, or any of the device, will do."""
        others = ["host", "host2"] if queue == "host" else ["compute", "h2d", "d2h", "more"]
        return Stream(queue=self.rng.choice(others) if self.chance(0.1) else queue)

    def copy(self, name: str, num_parts: int | None, version: int, to: str | Tier) -> str:
        """Copy from any holder to a slot, or to some place in a tier; returns the slot."""
        holders = self.holders(name, num_parts, version)
        if not holders:
            raise DeadEndError
        source = self.rng.choice(holders)
        self.pins.append(Pin(self.span(name, source, num_parts), "read"))
        slot = self.place(name, num_parts, to) if isinstance(to, Tier) else to
        if not self.may_overwrite(self.span(name, slot, num_parts)):
            raise DeadEndError
        self.pins.pop()
        from_to = self.slots[source].tier.kind[0] + self.slots[slot].tier.kind[0]
        queue = {"hd": "h2d", "dh": "d2h", "dd": "compute", "hh": "more"}[from_to]
        self.ops.append(
            Copy(
                op_id=f"copy{len(self.ops)}",
                stream=self.stream(queue),
                tensor=name,
                version=version,
                source=source,
                destination=slot,
                num_parts=num_parts,
            )
        )
        self.put(name, slot, num_parts, version)
        return slot

    def bring(self, operand: TaskOperand) -> str:
        """A device slot that holds what the operand reads."""
        name, num_parts = operand.tensor, operand.num_parts
        near = [
            slot for slot in self.holders(name, num_parts, operand.version)
            if self.slots[slot].tier == DEVICE and not any(
                pin.span.overlaps(self.span(name, slot, num_parts)) for pin in self.pins
                if (pin.mode, operand.mode) != ("read", "read")
            )
        ]  # fmt: skip
        if near and self.chance(0.85):
            return self.rng.choice(near)
        return self.copy(name, num_parts, operand.version, DEVICE)

    def compute(self, task: Task) -> None:
        """Place the operands of a task and issue it."""
        self.wanted = {
            (leaf, operand.version)
            for operand in task.operands
            if operand.mode in ("read", "update")
            for leaf in self.leaves(operand.tensor, operand.num_parts)
        }
        operands = []
        for operand in task.operands:
            finds = operand.mode in ("read", "update")
            name, num_parts = operand.tensor, operand.num_parts
            slot = self.bring(operand) if finds else self.place(name, num_parts, DEVICE)
            self.pins.append(Pin(self.span(name, slot, num_parts), operand.mode))
            operands.append(Operand(**operand.model_dump(), slot=slot))
        self.ops.append(
            Compute(
                op_id=f"op-{task.task_id}",
                stream=Stream(queue="compute"),
                task=task.task_id,
                call=task.call,
                operands=tuple(operands),
                label=task.label,
            )
        )
        for placed in operands:
            if placed.mode != "read":
                self._make(placed)
        self.pins, self.wanted = [], set()

    def _make(self, operand: Operand) -> None:
        made = operand.version + (operand.mode == "update")
        garbage = operand.mode == "scratch"
        self.put(operand.tensor, operand.slot, operand.num_parts, None if garbage else made)
        for leaf in [] if garbage else self.leaves(operand.tensor, operand.num_parts):
            self.latest[leaf] = max(self.latest[leaf], made)

    def feed(self, name: str) -> None:
        version = self.latest[name] + 1
        slot = self.place(name, None, self.rng.choice([HOST, HOST, DEVICE]))
        item = Input(tensor=name, version=version, source="tokens", index=len(self.inputs))
        self.inputs.append(item)
        self.ops.append(
            Feed(
                op_id=f"feed{item.index}", stream=self.stream("host"), slot=slot,
                **item.model_dump(),
            )
        )  # fmt: skip
        self.put(name, slot, None, version)
        self.latest[name] = version

    def fetch(self, leaf: str, version: int, sink: str) -> None:
        slot = self.rng.choice(self.holders(leaf, None, version))
        self.ops.append(
            Fetch(
                op_id=f"fetch-{sink}", stream=self.stream("host"), tensor=leaf, version=version,
                slot=slot, sink=sink,
            )
        )  # fmt: skip
        del self.unfetched[leaf, version]
