"""Random small schedules of clusters, safe by construction.

A global program is made event by event: somebody computes, a group has a collective, classes send
and receive. Each event is appended to the ops of all classes that it concerns, so that the order of
events is one that all can follow; waits are then derived from what lies where.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any, NamedTuple

from tests.helpers.sketches import sketch, tensor
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Axis, Exchange, Mesh, RankClass, RankSchedule, Schedule
from twinstream.schedule.ops import Communicate, Compute, Copy, Label, Op, Operand, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Slot
from twinstream.schedule.workload import MachineRef

AXES = ("pp", "dp", "cp", "tp")
MOST_RANKS = 16
BASE_BYTES = 48
LABEL = Label(kind="task")
MACHINE = MachineRef(name="cluster", content_hash="0")
Cells = dict[str, tuple[int, ...]]


class Held(NamedTuple):
    """A version of a tensor in a slot."""

    tensor: str
    slot: str
    version: int


@dataclass
class ClassOps:
    """The ops of a class so far, and what it holds."""

    ops: list[Op] = field(default_factory=list)
    held: set[Held] = field(default_factory=set)
    newest: Counter[str] = field(default_factory=Counter)
    counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)


def cluster_of(
    mesh: Mesh, classes: Iterable[RankClass], schedules: dict[str, RankSchedule],
    order: Iterable[Iterable[tuple[str, str]]],
) -> Schedule:  # fmt: skip
    return Schedule(
        mesh=mesh, classes=tuple(classes), schedules=schedules,
        order=tuple(Exchange(sides=tuple(sides)) for sides in order),
        model={}, layout={}, seq_len=8, global_batch=1, model_flops=1, machine=MACHINE,
    )  # fmt: skip


def mesh_of(**sizes: int) -> Mesh:
    axes = tuple(Axis(name=name, size=size) for name, size in sizes.items())
    return Mesh(axes=axes, ranks_per_node=1)


def build(rng: Random, most_ranks: int = MOST_RANKS) -> Schedule:
    mesh = _random_mesh(rng, most_ranks)
    program = Program(rng, mesh, _random_cells(rng, mesh))
    program.broad = rng.random() < 0.4
    for _ in range(rng.randint(2, 8)):
        rng.choice([program.collective, program.message, program.message, program.compute])()
    program.collective()
    return program.finish()


def _random_mesh(rng: Random, most_ranks: int) -> Mesh:
    while True:
        names = sorted(rng.sample(AXES, rng.randint(1, 3)), key=AXES.index)
        sizes = {name: rng.choice([1, 2, 2, 2, 3, 4]) for name in names}
        mesh = mesh_of(**sizes)
        if 2 <= mesh.size <= most_ranks:
            return mesh


def _random_cells(rng: Random, mesh: Mesh) -> list[Cells]:
    """Products of parts of axes; sometimes one of them is cut once more."""
    parts = []
    for axis in mesh.axes:
        whole = tuple(range(axis.size))
        cuts = [[whole], [whole], [(i,) for i in whole]]
        if axis.size > 2:
            cuts += [[whole[::2], whole[1::2]], [whole[:2], whole[2:]]]
        if axis.name == "pp":
            cuts = cuts[-1:] + cuts[2:] * 2
        parts.append(rng.choice(cuts))
    cells = [dict(zip(mesh.names, found, strict=True)) for found in product(*parts)]
    cuttable = [(i, a) for i, cell in enumerate(cells) for a in mesh.names if len(cell[a]) > 1]
    if cuttable and rng.random() < 0.3:
        i, axis_name = rng.choice(cuttable)
        cell = cells.pop(i)
        cells += [{**cell, axis_name: part} for part in (cell[axis_name][:1], cell[axis_name][1:])]
    return [
        {
            a.name: cell[a.name]
            for a in mesh.axes
            if len(cell[a.name]) < a.size or rng.random() < 0.3
        }
        for cell in cells
    ]


class Program:
    """Appends events to the ops of classes."""

    def __init__(self, rng: Random, mesh: Mesh, cells: list[Cells]) -> None:
        self.rng = rng
        self.mesh = mesh
        self.broad = False  # all that can take part in an event do
        self.cells = cells
        self.classes = [ClassOps() for _ in cells]
        self.order: list[list[tuple[int, str]]] = []
        self.num_events = 0
        self.queues = {axis: rng.choice([axis, "comm"]) for axis in mesh.names}
        self.of_messages = rng.choice([("send", "recv"), ("p2p", "p2p"), ("comm", "recv")])
        self.tensors = {"w": tensor("w", 64)}
        self.slots = {
            "host.w": Slot(slot_id="host.w", tier=HOST, offset_bytes=0, size_bytes=64),
            "device.w": Slot(slot_id="device.w", tier=DEVICE, offset_bytes=0, size_bytes=64),
        }
        axes = [range(axis.size) for axis in mesh.axes]
        self.class_of = {rank: self._find(rank) for rank in product(*axes)}
        for one in self.classes:
            copy = {"tensor": "w", "version": 0, "source": "host.w", "destination": "device.w"}
            one.ops.append(Copy(op_id="load", stream=Stream(queue="h2d"), **copy))

    def _find(self, rank: tuple[int, ...]) -> int:
        at = dict(zip(self.mesh.names, rank, strict=True))
        [found] = [
            i for i, cell in enumerate(self.cells) if all(at[a] in part for a, part in cell.items())
        ]
        return found

    # --- who meets whom, rank by rank

    def lines(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Sets of classes of which every group along the axes meets all or none."""
        keep = [i for i, name in enumerate(self.mesh.names) if name not in axes]
        groups: dict[tuple[int, ...], set[int]] = {}
        for rank, number in self.class_of.items():
            groups.setdefault(tuple(rank[i] for i in keep), set()).add(number)
        kinds = {frozenset(group) for group in groups.values()}
        sound = [g for g in kinds if not any(g != other and g & other for other in kinds)]
        return sorted(sorted(group) for group in sound)

    def ways(self, axis: str, shift: int) -> list[tuple[int, int]]:
        """Pairs of classes of which one is the other, shifted."""
        at, size = self.mesh.names.index(axis), self.mesh.length(axis)
        if shift % size == 0:
            return []
        pairs = {
            (number, self.class_of[*rank[:at], (rank[at] + shift) % size, *rank[at + 1 :]])
            for rank, number in self.class_of.items()
        }
        senders, receivers = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
        return sorted((a, b) for a, b in pairs if senders[a] == 1 == receivers[b])

    # --- tensors and slots

    def tensor(self, kind: str, size_bytes: int) -> str:
        """One of that size, with two slots that share no bytes; others may lie there, too."""
        name = f"{kind}{size_bytes}"
        if name not in self.tensors:
            self.tensors[name] = tensor(name, size_bytes)
            for region in (1, 2):
                offset = 256 * (16 * (region + 2 * (kind == "y")) + self.rng.randrange(3))
                slot = f"{name}.{region}"
                self.slots[slot] = Slot(
                    slot_id=slot, tier=DEVICE, offset_bytes=offset, size_bytes=size_bytes + 64
                )
        return name

    def _record(self, number: int, operand: Operand) -> None:
        if operand.mode == "read":
            return
        one, made = self.classes[number], operand.version + (operand.mode == "update")
        start, end = self._span(operand.slot)
        one.held = {
            h for h in one.held if self._span(h.slot)[1] <= start or end <= self._span(h.slot)[0]
        } | {Held(operand.tensor, operand.slot, made)}
        one.newest[operand.tensor] = max(made, one.newest[operand.tensor])

    def _span(self, slot: str) -> tuple[int, int]:
        found = self.slots[slot]
        return found.offset_bytes, found.offset_bytes + found.size_bytes

    # --- events

    def compute(self) -> None:
        """Somebody reads what it holds."""
        for number in self._some(range(len(self.classes))):
            held = sorted(self.classes[number].held)[: self.rng.randint(0, 2)]
            self._compute(number, [_operand(h.tensor, h.slot, h.version, "read") for h in held])

    def _compute(self, number: int, operands: list[Operand]) -> None:
        op_id = f"compute{self._next()}"
        self.classes[number].ops.append(
            Compute(
                op_id=op_id, stream=Stream(queue="compute"), task=op_id, call="call",
                operands=tuple(operands), label=LABEL,
            )
        )  # fmt: skip
        for operand in operands:
            self._record(number, operand)

    def _have(self, numbers: list[int], name: str) -> Held:
        """All hold the same version of a tensor in the same slot, made now unless they do."""
        slots = [f"{name}.{region}" for region in (1, 2)]
        held = set.intersection(*(self.classes[n].held for n in numbers))
        usable = sorted(
            h for h in held
            if h.tensor == name and all(h.version == self.classes[n].newest[name] for n in numbers)
        )  # fmt: skip
        if usable and self.rng.random() < 0.5:
            return usable[0]
        made = Held(name, self.rng.choice(slots), 1 + self._newest(numbers, name))
        event = self.num_events
        for number in numbers:
            self.num_events = event
            self._compute(number, [_operand(*made, "write")])
        return made

    def _newest(self, numbers: list[int], name: str) -> int:
        return max(self.classes[n].newest[name] for n in numbers)

    def collective(self) -> None:
        axes = tuple(self.rng.sample(self.mesh.names, self.rng.choice([1, 1, 2])
                     if len(self.mesh.names) > 1 else 1))  # fmt: skip
        kind = self.rng.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
        in_place, event = self.rng.random() < 0.5, self.num_events
        state = self.rng.getstate()
        for line in self._some(self.lines(axes)):
            if self.broad:  # the same for all
                self.num_events = event
                self.rng.setstate(state)
            self._collect(line, axes, kind, in_place)

    def _collect(self, line: list[int], axes: tuple[str, ...], kind: str, in_place: bool) -> None:
        num_ranks = 1
        for axis in axes:
            num_ranks *= self.mesh.length(axis)
        whole = BASE_BYTES * num_ranks
        given, taken = {
            "all_gather": (BASE_BYTES, whole), "reduce_scatter": (whole, BASE_BYTES),
        }.get(kind, (whole, whole))  # fmt: skip
        if kind == "all_reduce" or (in_place and kind != "all_to_all"):
            held = self._have(line, self.tensor("x", whole))
            operands = [_operand(*held, "update")]
        else:
            held = self._have(line, self.tensor("x", given))
            name = self.tensor("y", taken)
            version = 1 + self._newest(line, name)
            operands = [_operand(*held, "read"), _operand(name, f"{name}.1", version, "write")]
        op_id = f"{kind}{self._next()}"
        for number in line:
            self._communicate(number, op_id, kind, axes, operands)
        self.order.append([(number, op_id) for number in line])

    def message(self) -> None:
        """A send and its recv; or a chain, as through a pipeline."""
        axis, shift = self.rng.choice(self.mesh.names), self.rng.choice([1, 1, -1, 2])
        ways, kind = self.ways(axis, shift), self.rng.choice("xy")
        if not ways:
            return
        chosen = [self.rng.choice(ways)]
        if self.broad or self.rng.random() < 0.5:
            after = dict(ways)
            while (at := chosen[-1][1]) in after and all(at != a for a, _ in chosen):
                chosen.append((at, after[at]))
        for sender, receiver in chosen[: self.rng.randint(1, 5)]:
            self._send(sender, receiver, axis, shift, self.tensor(kind, BASE_BYTES))

    def _send(self, sender: int, receiver: int, axis: str, shift: int, name: str) -> None:
        newest = self._newest([sender, receiver], name)
        slot = f"{name}.{self.rng.choice([1, 2])}"
        self._compute(sender, [_operand(name, slot, newest + 1, "write")])
        into = f"{name}.{3 - int(slot[-1])}" if sender == receiver else slot
        event = self._next()
        both = [(sender, f"send{event}", "send", shift, _operand(name, slot, newest + 1, "read")),
                (receiver, f"recv{event}", "recv", -shift,
                 _operand(name, into, newest + 1, "write"))]  # fmt: skip
        for number, op_id, kind, step, operand in self.rng.sample(both, 2):
            self._communicate(number, op_id, kind, (axis,), [operand], step)
        self.order.append([(number, op_id) for number, op_id, *_ in both])

    def _communicate(
        self, number: int, op_id: str, kind: str, axes: tuple[str, ...], operands: list[Operand],
        shift: int = 0,
    ) -> None:  # fmt: skip
        queue = self.queues[axes[0]]
        if shift:
            queue = self.of_messages[kind == "recv"]
            if self.of_messages == ("p2p", "p2p") and kind == "recv" and self._is_ring(axes[0]):
                queue = "recv"
        counted = (axes, shift, kind if shift else queue)
        one = self.classes[number]
        one.ops.append(
            Communicate.model_validate({
                "op_id": op_id, "stream": Stream(queue=queue), "collective": kind, "axes": axes,
                "shift": shift, "sequence": one.counts[counted], "operands": tuple(operands),
                "label": LABEL,
            })
        )  # fmt: skip
        one.counts[counted] += 1
        for operand in operands:
            self._record(number, operand)

    def _is_ring(self, axis: str) -> bool:
        """Some class sends to itself, and so needs a queue for either."""
        return any(a == b for shift in (1, -1, 2) for a, b in self.ways(axis, shift))

    def _some(self, choices: Iterable[Any]) -> list[Any]:
        found = list(choices)
        return found if self.broad or not found else [self.rng.choice(found)]

    def _next(self) -> int:
        self.num_events += 1
        return self.num_events

    # --- the document

    def finish(self) -> Schedule:
        for one in self.classes:
            update = Compute(
                op_id="step", stream=Stream(queue="compute"), task="step", call="call",
                operands=(_operand("w", "device.w", 0, "update"),), label=LABEL,
            )  # fmt: skip
            copy = {"tensor": "w", "version": 1, "source": "device.w", "destination": "host.w"}
            one.ops += [update, Copy(op_id="store", stream=Stream(queue="d2h"), **copy)]
        schedules: dict[str, RankSchedule] = {}
        classes = []
        for number, (cell, one) in enumerate(zip(self.cells, self.classes, strict=True)):
            made = schedule_of(one.ops, self.tensors.values(), self.slots.values())
            same = [name for name, known in schedules.items() if known.ops == made.ops]
            name = same[0] if same else f"schedule{number}"
            schedules.setdefault(name, made)
            classes.append(RankClass(name=f"class{number}", schedule=name, cells=cell))
        order = [[(f"class{number}", op_id) for number, op_id in sides] for sides in self.order]
        return cluster_of(self.mesh, classes, schedules, order)


def schedule_of(ops: Iterable[Op], tensors: Iterable[Any], slots: Iterable[Slot]) -> RankSchedule:
    """With derived waits; `w` is carried on the host."""
    found = derive_waits(tuple(ops), tuple(tensors), tuple(slots))
    return sketch(
        found, tensors=tuple(tensors), slots=tuple(slots),
        carried=(Carried(tensor="w", slot="host.w"),),
    )  # fmt: skip


def _operand(tensor_id: str, slot: str, version: int, mode: Any) -> Operand:
    return Operand(name=mode, tensor=tensor_id, version=version, mode=mode, slot=slot)
