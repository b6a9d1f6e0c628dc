"""Random small (chain, schedule) pairs that are safe and conforming, made without our planner.

A builder invents tasks and issues ops one by one, keeping track of what lies where: it copies
content in when an op needs it, overwrites what nobody needs, and at the end brings every
carried slot up to date. The waits come from the brute-force oracle: every conflict gets one,
then redundant ones are dropped at random.
"""

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from tests.helpers.schedule_oracle import (
    Arena,
    Wait,
    conflicts,
    conformity_problems,
    content_problems,
    happens_before,
    leaves_of,
    parts_of,
    span_of,
)
from twinstream.schedule.chain import Chain, Input, Output, Recompute, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import (
    Compute,
    Copy,
    Feed,
    Fetch,
    KernelCall,
    Label,
    Mode,
    Op,
    Operand,
    Stream,
    TaskOperand,
)
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Role, Slot, Tensor, Tier
from twinstream.schedule.workload import MachineRef, ModelRef, Workload

ARENA_UNITS = {DEVICE: 7, HOST: 12}  # slots start within so many times 256 bytes
SIZES = [24, 64, 100, 256, 300, 512]
WORKLOAD = Workload(seq_len=8, chunk_tokens=8, chunks_per_round=1, rounds_per_step=1)
MODEL = ModelRef(name="random", content_hash="0", spec={"layers": 1, "note": None})
RECIPE = {"optimizer": "adamw", "betas": [0.9, 0.95], "clip": None}
LABEL = Label(kind="block_forward", layer=0, round=0)
CALLS = ["call0", "call1", "call2"]
MODES: list[Mode] = ["read", "read", "update", "write", "write", "scratch"]
WORK = Work(unit="matmul", shape=(2, 3, 4), flops=48, hbm_bytes=52, launches=1)


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
            parts.append(_tensor(f"{name}.{i}", size, role, parent=name, offset_bytes=offset))
            offset += size
        size = offset + self.rng.choice([0, 60]) if with_parts else self.rng.choice(SIZES)
        for tensor in [_tensor(name, size, role), *parts]:
            self.tensors[tensor.tensor_id] = tensor
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

    # --- ops

    def stream(self, queue: str) -> Stream:
        odd = self.rng.choice(["compute", "compute2", "h2d", "d2h", "host"])
        return Stream(queue=odd if self.chance(0.1) else queue)

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
        queue = {"hd": "h2d", "dh": "d2h", "dd": "compute", "hh": "host"}[from_to]
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
                stream=self.stream(self.rng.choice(["compute", "compute", "compute2"])),
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

    # --- tasks

    def invent_task(self, number: int) -> Task:
        operands: list[TaskOperand] = []
        made: set[str] = set()
        for i in range(self.rng.randint(1, 4)):
            mode = self.rng.choice(MODES)
            name = self.rng.choice(list(self.tensors))
            parts = len(parts_of(self.tensors, name))
            num_parts = self.rng.randint(1, parts) if parts and self.chance(0.4) else None
            leaves = self.leaves(name, num_parts)
            newest = max(self.latest[leaf] for leaf in leaves)
            there = sorted({h.version for h in self.held if h.leaf == leaves[0]})
            found = [v for v in there if self.holders(name, num_parts, v)]
            version = {
                "read": self.rng.choice((found if self.chance(0.2) else found[-1:]) or [0]),
                "update": newest,
                "write": max(1, newest + self.rng.choice([0, 1, 1, 1, 2])),
                "scratch": 0,
            }[mode]
            if mode in ("read", "update") and version not in found:
                continue
            if mode == "update" and (
                any(self.latest[leaf] != newest for leaf in leaves)
                or any((leaf, newest) in self.unfetched for leaf in leaves)
            ):
                continue
            if mode in ("update", "write"):
                if made.intersection(leaves):
                    continue
                made.update(leaves)
            operands.append(
                TaskOperand(
                    name=f"x{i}", tensor=name, version=version, mode=mode, num_parts=num_parts
                )
            )
        return Task(
            task_id=f"t{number}", call=self.rng.choice(CALLS), operands=tuple(operands), label=LABEL
        )

    def recompute(self, before: str) -> None:
        """Run an earlier task again, if what it reads is there and what it makes is newest."""
        for task in self.rng.sample(self.tasks, len(self.tasks)):
            repeatable = all(
                {
                    "read": bool(self.holders(o.tensor, o.num_parts, o.version)),
                    "write": all(
                        self.latest[leaf] == o.version
                        for leaf in self.leaves(o.tensor, o.num_parts)
                    ),
                    "update": False,
                    "scratch": True,
                }[o.mode]
                for o in task.operands
            )
            if repeatable:
                group = f"group{len(self.recomputes)}"
                for _ in range(self.rng.randint(1, 2)):
                    name = f"{task.task_id}-again{len(self.recomputes)}"
                    again = task.model_copy(update={"task_id": name})
                    self.recomputes.append(Recompute(task=again, before=before, group=group))
                if self.chance(0.8):
                    self.compute(again)
                return

    # --- the pass boundary

    def carry(self, name: str) -> None:
        """Place a persistent tensor's version 0: in host memory, on the device, or both."""
        tiers = self.rng.choice([[HOST], [HOST], [DEVICE], [HOST, DEVICE], [HOST, HOST]])
        for tier in tiers:
            whole = self.chance(0.7) or not parts_of(self.tensors, name)
            for item in [name] if whole else self.leaves(name):
                slot = self.place(item, None, tier)
                self.pins.append(Pin(self.span(item, slot), "write"))
                self.carried.append(Carried(tensor=item, slot=slot))
                self.put(item, slot, None, 0)

    def write_back(self, item: Carried) -> None:
        """Bring a carried slot up to the newest version, as a whole or by part."""
        stale = [leaf for leaf in self.leaves(item.tensor) if not self._is_newest(leaf, item.slot)]
        versions = {self.latest[leaf] for leaf in self.leaves(item.tensor)}
        whole = len(versions) == 1 and self.holders(item.tensor, None, max(versions))
        if stale and whole and self.chance(0.6):
            self.copy(item.tensor, None, max(versions), item.slot)
        else:
            for leaf in stale:
                self.copy(leaf, None, self.latest[leaf], item.slot)

    def _is_newest(self, leaf: str, slot: str) -> bool:
        return Held(self.span(leaf, slot), leaf, self.latest[leaf]) in self.held

    def carry_more(self) -> None:
        """Also carry some of what is valid at the end and lies apart from the other pairs."""
        for name in self.tensors:
            for slot in [s for s in self.slots if self.fits(name, s, None)]:
                taken = [self.span(c.tensor, c.slot) for c in self.carried]
                valid = all(self._is_newest(leaf, slot) for leaf in self.leaves(name))
                apart = not any(span.overlaps(self.span(name, slot)) for span in taken)
                if valid and apart and self.chance(0.5):
                    self.carried.append(Carried(tensor=name, slot=slot))


def _tensor(
    name: str, size: int, role: Role, *, parent: str | None = None, offset_bytes: int = 0
) -> Tensor:
    return Tensor(
        tensor_id=name,
        size_bytes=size,
        role=role,
        dtype="uint8",
        shape=(size,),
        parent=parent,
        offset_bytes=offset_bytes,
    )


def _grow(builder: Builder) -> None:
    """Invent tensors and one pass over them."""
    rng = builder.rng
    builder.persistent = [f"weight{i}" for i in range(rng.randint(1, 3))]
    roles: dict[str, Role] = dict.fromkeys(builder.persistent, "parameter")
    roles |= {f"activation{i}": "activation" for i in range(rng.randint(1, 3))}
    roles |= {"tokens": "input", "loss": "loss", "temporary": "scratch"}
    for name, role in roles.items():
        divisible = role in ("parameter", "activation")
        builder.add_tensor(name, role, with_parts=divisible and builder.chance(0.4))
    persistent, builder.persistent = builder.persistent, []
    for name in persistent:
        builder.carry(name)
    builder.pins, builder.persistent = [], persistent
    for number in range(rng.randint(2, 6)):
        _one_task(builder, number)
    for (leaf, version), sink in list(builder.unfetched.items()):
        builder.fetch(leaf, version, sink)
    for item in rng.sample(builder.carried, len(builder.carried)):
        builder.write_back(item)
    builder.carry_more()


def _one_task(builder: Builder, number: int) -> None:
    """One task, and what a planner may do before it: feed, offload, prefetch, recompute."""
    rng = builder.rng
    if builder.chance(0.3):
        builder.feed("tokens")
    if builder.chance(0.3):
        builder.write_back(rng.choice(builder.carried))
    for held in rng.sample(builder.held, min(len(builder.held), rng.choice([0, 0, 1, 2]))):
        if builder.holders(held.leaf, None, held.version):
            builder.copy(held.leaf, None, held.version, rng.choice([HOST, DEVICE]))
    for _ in range(rng.choice([0, 0, 1, 2])):
        builder.recompute(f"t{number}")
    task = builder.invent_task(number)
    builder.tasks.append(task)
    builder.compute(task)
    made = [h for h in builder.held if h.version and builder.holders(h.leaf, None, h.version)]
    if made and builder.chance(0.3):
        held, sink = rng.choice(made), f"result{len(builder.outputs)}"
        if (held.leaf, held.version) not in builder.unfetched:
            output = Output(tensor=held.leaf, version=held.version, sink=sink)
            builder.outputs.append(output)
            builder.unfetched[held.leaf, held.version] = sink
            if builder.chance(0.5):
                builder.fetch(held.leaf, held.version, sink)


def build(rng: Random) -> tuple[Chain, Schedule]:
    """A random chain and a safe schedule that carries it out."""
    builder = Builder(rng)
    while True:
        try:
            _grow(builder)
            break
        except DeadEndError:
            builder = Builder(rng)
    chain = Chain(
        tensors=tuple(builder.tensors.values()),
        calls={name: _call(i) for i, name in enumerate(CALLS)},
        tasks=tuple(builder.tasks),
        recomputes=tuple(builder.recomputes),
        inputs=tuple(builder.inputs),
        outputs=tuple(builder.outputs),
        persistent=tuple(builder.persistent),
        workload=WORKLOAD,
        model=MODEL,
        recipe=RECIPE,
        model_flops=48,
    )
    schedule = Schedule(
        tensors=chain.tensors,
        slots=tuple(builder.slots.values()),
        calls=chain.calls,
        ops=tuple(builder.ops),
        carried=tuple(builder.carried),
        caps=_caps(builder),
        workload=WORKLOAD,
        model=MODEL,
        recipe=RECIPE,
        model_flops=48,
        machine=MachineRef(name="random", content_hash="0"),
        policy="random",
    )
    return chain, _with_waits(_carry_less(schedule, chain, rng), rng)


def _call(number: int) -> KernelCall:
    attributes = {"causal": True, "number": number, "scale": 0.5, "implementation": "eager"}
    return KernelCall(kernel=f"kernel{number}/eager", attributes=attributes, cost=(WORK,))


def _caps(builder: Builder) -> Caps:
    extents = {
        tier: max(
            (s.offset_bytes + s.size_bytes for s in builder.slots.values() if s.tier == tier),
            default=0,
        )
        for tier in (DEVICE, HOST)
    }
    caps = [builder.rng.choice([None, extent, extent + 100]) for extent in extents.values()]
    return Caps(device_bytes=caps[0], host_bytes=caps[1])


def _carry_less(schedule: Schedule, chain: Chain, rng: Random) -> Schedule:
    """Drop some pairs whose content a pass does not need, as far as the oracle is content."""
    for item in schedule.carried:
        if rng.random() < 0.8:
            continue
        kept = tuple(c for c in schedule.carried if c != item)
        fewer = schedule.model_copy(update={"carried": kept})
        arena = Arena(fewer, every_byte=False)
        if not content_problems(fewer, arena, 2) | conformity_problems(fewer, chain):
            schedule = fewer
    return schedule


def _with_waits(schedule: Schedule, rng: Random) -> Schedule:
    """Wait for every conflicting op, then drop redundant waits at random, or add some."""
    ops, size = schedule.ops, len(schedule.ops)
    _, pairs = conflicts(Arena(schedule, every_byte=False), num_passes=2)
    waits = {
        (second % size, first % size, second - second % size != first - first % size)
        for first, second in pairs
        if ops[first % size].stream != ops[second % size].stream
    }
    drops = rng.choice([0.0, 0.5, 1.0])
    for wait in rng.sample(sorted(waits), len(waits)):
        if rng.random() < drops:
            before = happens_before(schedule, waits - {wait}, 2)
            if all(first in before[second] for first, second in pairs):
                waits.remove(wait)
    for _ in range(rng.choice([0, 0, 3])):
        second, first = rng.randrange(size), rng.randrange(size)
        waits.add((second, first, True))
        if first < second and ops[first].stream != ops[second].stream:
            waits.add((second, first, False))
    return _waiting(schedule, waits)


def _waiting(schedule: Schedule, waits: set[Wait]) -> Schedule:
    ops = []
    for position, op in enumerate(schedule.ops):
        found: dict[bool, list[str]] = {False: [], True: []}
        for second, first, previous in sorted(waits):
            if second == position:
                found[previous].append(schedule.ops[first].op_id)
        ops.append(
            op.model_copy(
                update={"waits": tuple(found[False]), "waits_previous": tuple(found[True])}
            )
        )
    return schedule.model_copy(update={"ops": tuple(ops)})


def schedules() -> st.SearchStrategy[tuple[Chain, Schedule]]:
    """Safe, conforming (chain, schedule) pairs; smaller seeds do not mean smaller pairs."""
    return st.integers(min_value=0, max_value=2**32).map(lambda seed: build(Random(seed)))
