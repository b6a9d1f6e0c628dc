"""A realistic large schedule: a streaming training loop of any number of ops."""

from typing import Any

from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import (
    Compute,
    Copy,
    KernelCall,
    Label,
    Mode,
    Op,
    Operand,
    Stream,
    TaskOperand,
)
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Slot, Tensor, Tier
from twinstream.schedule.workload import MachineRef, ModelRef, Workload

LAYERS, CHUNKS, RING = 32, 8, 4
PARAMETER_BYTES, STATE_BYTES, ACTIVATION_BYTES = 1 << 20, 3 << 20, 1 << 16
COMPUTE, H2D, D2H = Stream(queue="compute"), Stream(queue="h2d"), Stream(queue="d2h")
WORKLOAD = Workload(seq_len=1024, chunk_tokens=1024, chunks_per_round=CHUNKS, rounds_per_step=1)
MODEL = ModelRef(name="bench", content_hash="0", spec={})
CALL = KernelCall(
    kernel="block/eager",
    attributes={"causal": True},
    cost=(Work(unit="matmul", shape=(8, 8, 8), flops=1024, hbm_bytes=384, launches=1),),
)


class StreamingLoop:
    """Rounds of forward and backward with parameters and activations streamed, then the update.

    Every op waits for whatever last touched its slots; phases whose slots overlap those of the
    phase before, and the pass boundary, are barriers.
    """

    def __init__(self, num_ops: int) -> None:
        self.tensors: list[Tensor] = []
        self.slots: list[Slot] = []
        self.ops: list[Op] = []
        self.tasks: list[Task] = []
        self.carried: list[Carried] = []
        self.version: dict[str, int] = {}
        self._used: dict[str, list[Op]] = {}  # per slot, its writer and the readers since
        self._last: dict[str, str] = {}
        self._place: dict[str, int] = {}
        self._barrier: dict[str, list[str]] = {}
        self._extent = {DEVICE: 0, HOST: 0}
        self._declare()
        while len(self.ops) < num_ops:
            self._phase("forward")
            self._phase("backward")
        self.barrier()
        self._update()

    def _declare(self) -> None:
        for layer in range(LAYERS):
            self.tensor(f"W{layer}", PARAMETER_BYTES, home=True)
            self.tensor(f"O{layer}", STATE_BYTES, home=True)
            self.tensor(f"G{layer}", PARAMETER_BYTES)
            self.slot(f"hostG{layer}", HOST, PARAMETER_BYTES)
            self.context(f"K{layer}")
            for chunk in range(CHUNKS):
                self.tensor(f"X{layer}.{chunk}", ACTIVATION_BYTES)
                self.slot(f"hostX{layer}.{chunk}", HOST, ACTIVATION_BYTES)
        for chunk in range(CHUNKS):
            self.tensor(f"D{chunk}", ACTIVATION_BYTES)
            self.slot(f"devD{chunk}", DEVICE, ACTIVATION_BYTES)
        for name in ("S", "T"):
            self.tensor(name, ACTIVATION_BYTES)
            self.slot(f"dev{name}", DEVICE, ACTIVATION_BYTES)
        self.tensor("step", 256)
        self.slot("devStep", DEVICE, 256)
        self.carried.append(Carried(tensor="step", slot="devStep"))
        for i in range(RING * CHUNKS):
            self.slot(f"devX{i}", DEVICE, ACTIVATION_BYTES)
        for i in range(RING):
            self.slot(f"devK{i}", DEVICE, CHUNKS * ACTIVATION_BYTES)
        start = self._extent[DEVICE]
        for i in range(2 * RING):
            self.slot(f"forwardW{i}", DEVICE, PARAMETER_BYTES)
        self._extent[DEVICE] = start
        for i in range(2 * RING):  # over the slots of forward, shifted
            self.slot(f"backwardG{i}", DEVICE, PARAMETER_BYTES)
            self.slot(f"backwardW{i}", DEVICE, PARAMETER_BYTES + 256)
        self._extent[DEVICE] = start
        for i in range(RING):
            self.slot(f"updateO{i}", DEVICE, STATE_BYTES)
            self.slot(f"updateW{i}", DEVICE, PARAMETER_BYTES)
            self.slot(f"updateG{i}", DEVICE, PARAMETER_BYTES)

    def tensor(self, name: str, size: int, *, home: bool = False) -> None:
        self.tensors.append(
            Tensor(tensor_id=name, size_bytes=size, role="parameter", dtype="uint8", shape=(size,))
        )
        self.version[name] = 0
        if home:
            self.slot(f"host{name}", HOST, size)
            self.carried.append(Carried(tensor=name, slot=f"host{name}"))

    def context(self, name: str) -> None:
        self.tensor(name, CHUNKS * ACTIVATION_BYTES)
        whole = self.tensors[-1]
        for chunk in range(CHUNKS):
            part = {
                "tensor_id": f"{name}.{chunk}",
                "size_bytes": ACTIVATION_BYTES,
                "shape": (ACTIVATION_BYTES,),
                "parent": name,
                "offset_bytes": chunk * ACTIVATION_BYTES,
            }
            self.tensors.append(whole.model_copy(update=part))

    def slot(self, name: str, tier: Tier, size: int) -> None:
        offset = self._extent[tier]
        self.slots.append(Slot(slot_id=name, tier=tier, offset_bytes=offset, size_bytes=size))
        self._extent[tier] = offset + size

    def barrier(self) -> None:
        """The next op of every stream waits for the last ops of the others."""
        last = list(self._last.values())
        self._barrier = {str(stream): last for stream in (COMPUTE, H2D, D2H)}
        self._used.clear()

    def issue(self, op: Op, reads: list[str], writes: list[str]) -> None:
        touched = [self._used.get(slot, [])[:1] for slot in reads]
        touched += [self._used.get(slot, []) for slot in writes]
        newest: dict[str, Op] = {}
        earlier = {o.op_id: o for ops in touched for o in ops}
        for op_id in sorted(earlier, key=self._place.__getitem__):
            newest[str(earlier[op_id].stream)] = earlier[op_id]
        waits = {o.op_id for o in newest.values() if o.stream != op.stream}
        held = self._last.get(str(op.stream))
        waits.update(w for w in self._barrier.pop(str(op.stream), []) if w != held)
        op = op.model_copy(update={"waits": tuple(sorted(waits))})
        for slot in reads:
            self._used.setdefault(slot, [op]).append(op)
        for slot in writes:
            self._used[slot] = [op]
        self._place[op.op_id] = len(self.ops)
        self._last[str(op.stream)] = op.op_id
        self.ops.append(op)

    def copy(self, tensor: str, source: str, destination: str) -> None:
        op = Copy(
            op_id=f"copy{len(self.ops)}",
            stream=H2D if source.startswith("host") else D2H,
            tensor=tensor,
            version=self.version[tensor],
            source=source,
            destination=destination,
        )
        self.issue(op, [source], [destination])

    def compute(self, *uses: tuple[str, str, Mode, int | None]) -> None:
        operands = []
        for i, (tensor, slot, mode, num_parts) in enumerate(uses):
            version = self.version.get(tensor, self.version.get(tensor.split(".")[0], 0))
            if mode == "write" and tensor in self.version:
                version = self.version[tensor] = version + 1
            elif mode == "update":
                self.version[tensor] += 1
            operand = TaskOperand(
                name=f"x{i}",
                tensor=tensor,
                version=0 if mode == "scratch" else version,
                mode=mode,
                num_parts=num_parts,
            )
            operands.append(Operand(**operand.model_dump(), slot=slot))
        task = Task(
            task_id=f"task{len(self.tasks)}",
            call="block",
            label=Label(kind="block"),
            operands=tuple(TaskOperand(**o.model_dump(exclude={"slot"})) for o in operands),
        )
        self.tasks.append(task)
        op = Compute(
            op_id=f"op-{task.task_id}",
            stream=COMPUTE,
            task=task.task_id,
            call="block",
            operands=tuple(operands),
            label=task.label,
        )
        reads = [slot for _, slot, mode, _ in uses if mode == "read"]
        self.issue(op, reads, [slot for _, slot, mode, _ in uses if mode != "read"])

    def _phase(self, kind: str) -> None:
        self.barrier()
        order = range(LAYERS) if kind == "forward" else reversed(range(LAYERS))
        first = {f"G{layer}" for layer in range(LAYERS) if self.version[f"G{layer}"] == 0}
        for layer in order:
            weight = f"{kind}W{layer % (2 * RING)}"
            self.copy(f"W{layer}", f"hostW{layer}", weight)
            if kind == "forward":
                self._forward(layer, weight)
            else:
                gradient = f"backwardG{layer % (2 * RING)}"
                if f"G{layer}" not in first:
                    self.copy(f"G{layer}", f"hostG{layer}", gradient)
                self._backward(layer, weight, gradient)
                self.copy(f"G{layer}", gradient, f"hostG{layer}")

    def _forward(self, layer: int, weight: str) -> None:
        context = f"devK{layer % RING}"
        self.version[f"K{layer}"] += 1
        for chunk in range(CHUNKS):
            made = f"devX{layer % RING * CHUNKS + chunk}"
            uses: list[tuple[str, str, Mode, int | None]] = [
                (f"W{layer}", weight, "read", None),
                (f"X{layer}.{chunk}", made, "write", None),
                (f"D{chunk}", f"devD{chunk}", "write", None),
                (f"K{layer}.{chunk}", context, "write", None),
                ("S", "devS", "scratch", None),
            ]
            if layer:
                below = f"devX{(layer - 1) % RING * CHUNKS + chunk}"
                uses.insert(1, (f"X{layer - 1}.{chunk}", below, "read", None))
            if chunk:
                uses.insert(1, (f"K{layer}", context, "read", chunk))
            self.compute(*uses)
            self.copy(f"X{layer}.{chunk}", made, f"hostX{layer}.{chunk}")

    def _backward(self, layer: int, weight: str, gradient: str) -> None:
        for chunk in reversed(range(CHUNKS)):
            saved = f"devX{layer % RING * CHUNKS + chunk}"
            self.copy(f"X{layer}.{chunk}", f"hostX{layer}.{chunk}", saved)
            mode: Mode = "update" if self.version[f"G{layer}"] else "write"
            self.compute(
                (f"W{layer}", weight, "read", None),
                (f"X{layer}.{chunk}", saved, "read", None),
                (f"D{chunk}", f"devD{chunk}", "update", None),
                (f"G{layer}", gradient, mode, None),
                ("S", "devS", "scratch", None),
                ("T", "devT", "scratch", None),
                ("step", "devStep", "read", None),
            )

    def _update(self) -> None:
        for layer in range(LAYERS):
            where = {name: f"update{name}{layer % RING}" for name in "OWG"}
            for name, slot in where.items():
                self.copy(f"{name}{layer}", f"host{name}{layer}", slot)
            self.compute(
                (f"W{layer}", where["W"], "update", None),
                (f"O{layer}", where["O"], "update", None),
                (f"G{layer}", where["G"], "read", None),
            )
            self.copy(f"W{layer}", where["W"], f"hostW{layer}")
            self.copy(f"O{layer}", where["O"], f"hostO{layer}")

    def documents(self) -> tuple[Chain, Schedule]:
        first = {str(op.stream): i for i, op in reversed(list(enumerate(self.ops)))}
        for i in first.values():
            previous = tuple(self._last.values())
            self.ops[i] = self.ops[i].model_copy(update={"waits_previous": previous})
        shared: dict[str, Any] = {
            "tensors": tuple(self.tensors),
            "calls": {"block": CALL},
            "workload": WORKLOAD,
            "model": MODEL,
            "recipe": {},
            "model_flops": 1024,
        }
        chain = Chain(
            tasks=tuple(self.tasks),
            recomputes=(),
            inputs=(),
            outputs=(),
            persistent=tuple(c.tensor for c in self.carried),
            round_starts=(0,),
            **shared,
        )
        schedule = Schedule(
            slots=tuple(self.slots),
            ops=tuple(self.ops),
            carried=tuple(self.carried),
            caps=Caps(device_bytes=self._extent[DEVICE]),
            machine=MachineRef(name="bench", content_hash="0"),
            policy="streaming",
            **shared,
        )
        return chain, schedule
