"""`ml_dataflow`: the seed system's schedule, as its rules are restated.

Source: shared/data/README.md, sections 2.7 and 2.8 (als244/ml_dataflow, July 2025). Fixed rings of
slots, one FIFO queue each for what comes in and what goes out, a second inbound queue for context,
copies inside the device on the compute queue, a barrier between steps.

Where it differs from its source: our chain's backward of a block is one task, so that context of
the layer below is fetched and copied before or after the whole of it, not between the gradients of
inputs and those of weights; saved activations move in up to four copies, not in one; tokens come
in on a queue of their own; gradients begin with a write, not with zeros.
"""

from collections.abc import Sequence

from twinstream.fidelity.seed_system.sizing import Sizing
from twinstream.fidelity.seed_system.slots import SAVED_UNITS, SlotMap, extent_bytes
from twinstream.models.flops import SavedLevel
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, Op, Operand, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Carried
from twinstream.schedule.timeline import PassSpans
from twinstream.schedule.workload import MachineRef, Workload

COMPUTE = Stream(queue="compute")
INBOUND = Stream(queue="h2d")
INBOUND_CONTEXT = Stream(queue="h2d_context")
INBOUND_TOKENS = Stream(queue="h2d_inputs")
OUTBOUND = Stream(queue="d2h")
OUTBOUND_LOSS = Stream(queue="d2h_loss")
HOST_QUEUE = Stream(queue="host")

NAME = "ml_dataflow"


def seed_chain(spec: ModelSpec, workload: Workload) -> Chain:
    """The training step as the seed system computes it.

    The head works on a whole chunk's logits, all updates follow the last backward, and nothing is
    rounded at random.
    """
    recipe = Recipe(
        optimizer="device_after_backward",
        max_row_slice=workload.chunk_tokens,
        stochastic_rounding=False,
    )
    return lower(spec, workload, recipe)


def emit_seed(spec: ModelSpec, chain: Chain, sizing: Sizing, machine: MachineRef) -> RankSchedule:
    """The seed system's schedule of a chain of `seed_chain`.

    The chain may have fewer rounds than `sizing` says: a shorter step of the same plan. Its caps
    are what the plan takes of each memory, or what our tensors take where that is more: gradients
    of context are float32 here and bf16 there.
    """
    emission = _Emission(spec, chain, sizing)
    emission.run()
    slots = tuple(emission.slots.slots.values())
    ops = derive_waits(tuple(emission.ops), chain.tensors, slots)
    used = {op.call for op in ops if isinstance(op, Compute)}
    return RankSchedule(
        tensors=chain.tensors,
        slots=slots,
        calls={name: call for name, call in chain.calls.items() if name in used},
        ops=with_barrier(_with_waits(ops, emission.also_waits)),
        carried=tuple(emission.carried()),
        caps=Caps(device_bytes=extent_bytes(slots, DEVICE), host_bytes=extent_bytes(slots, HOST)),
        workload=chain.workload,
        model=chain.model,
        recipe=chain.recipe,
        model_flops=chain.model_flops,
        machine=machine,
        policy=NAME,
    )


def timed_ns(schedule: RankSchedule, spans: PassSpans) -> int:
    """Return what the seed system times of a step: from compute's start to the last copy out."""
    starts = [s for op, s in zip(schedule.ops, spans.start_ns, strict=True) if op.stream == COMPUTE]
    ends = [e for op, e in zip(schedule.ops, spans.end_ns, strict=True) if op.stream == OUTBOUND]
    return max(ends) - min(starts)


def with_barrier(ops: Sequence[Op]) -> tuple[Op, ...]:
    """No queue starts a pass before every other is through with the pass before."""
    last = {str(op.stream): op.op_id for op in ops}
    found: list[Op] = []
    begun: set[str] = set()
    for op in ops:
        stream = str(op.stream)
        if stream not in begun:
            begun.add(stream)
            others = tuple(op_id for name, op_id in last.items() if name != stream)
            op = op.model_copy(update={"waits_previous": others})
        found.append(op)
    return tuple(found)


def _with_waits(ops: Sequence[Op], also: dict[str, str]) -> list[Op]:
    """Add waits that no conflict of bytes implies."""
    found: list[Op] = []
    for op in ops:
        more = also.get(op.op_id)
        if more is not None and more not in op.waits:
            op = op.model_copy(update={"waits": (*op.waits, more)})
        found.append(op)
    return found


class _Emission:
    """Walks the chain once and issues as the seed system's host thread does."""

    def __init__(self, spec: ModelSpec, chain: Chain, sizing: Sizing) -> None:
        self.spec, self.chain, self.sizing = spec, chain, sizing
        self.slots = SlotMap(spec, chain, sizing)
        self.ops: list[Op] = []
        self.also_waits: dict[str, str] = {}
        self._gradient_ready: dict[tuple[int, int], str] = {}  # op, by (round, layer)
        self.layers = spec.num_layers
        self.chunks = chain.workload.chunks_per_round
        self.per_sequence = chain.workload.chunks_per_sequence
        self.rounds = chain.workload.rounds_per_step
        self._tasks = iter(chain.tasks)
        self._recomputes = {r.task.task_id: r.task for r in chain.recomputes}
        self._inputs = {(i.tensor, i.version): i for i in chain.inputs}
        self._versions: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def run(self) -> None:
        self._feed("step_state", 1)
        for round_ in range(self.rounds):
            self._forward(round_)
            for _ in range(self.chunks):
                self._compute(next(self._tasks), None, None)
            if round_ == self.rounds - 1:
                self._fetch_loss()
            for layer in reversed(range(self.layers)):
                self._backward_layer(round_, layer)
            for _ in range(self.chunks):
                self._compute(next(self._tasks), None, None)
        self._optimizer()

    def carried(self) -> list[Carried]:
        """State at home; of embedding and head on the device too, and the first layers there."""
        found = [
            Carried(tensor=f"param.{g}", slot=f"host.param.{g}") for g in ("embedding", "head")
        ]
        for group in ("embedding", "head"):
            found += [
                Carried(tensor=f"{kind}.{group}", slot=f"device.{kind}.{group}")
                for kind in ("param", "opt")
            ]
        for layer in range(self.layers):
            found += [
                Carried(tensor=f"{kind}.{layer}", slot=f"host.{kind}.{layer}")
                for kind in ("param", "opt")
            ]
        for layer in range(self.sizing.param_blocks):
            found.append(Carried(tensor=f"param.{layer}", slot=self.slots.block("param", layer)))
        return found

    def _forward(self, round_: int) -> None:
        for chunk in range(self.chunks):
            self._feed(f"tokens.{chunk}", round_ + 1)
        for _ in range(self.chunks):
            self._compute(next(self._tasks), None, None)
        grads = iter(range(self.layers - 1, self.layers - 1 - self.sizing.grad_blocks, -1))
        for layer in range(self.layers):
            for chunk in range(self.chunks):
                self._forward_chunk(layer, chunk)
            ahead = layer + self.sizing.param_blocks
            if ahead < self.layers:
                self._load("param", ahead)
            elif round_ and (grad := next(grads, None)) is not None:
                self._gradient_ready[round_, grad] = self._load("grad", grad)

    def _forward_chunk(self, layer: int, chunk: int) -> None:
        act = layer * self.chunks + chunk
        into, slots = self.slots.saved("input", act), self.slots
        hidden = f"hidden.{layer}.{chunk}"
        self._copy(COMPUTE, hidden, slots.hidden(layer, chunk), into)
        self._compute(next(self._tasks), layer, chunk, hidden=slots.hidden(layer, chunk))
        self._copy_context(act)
        if act < self.sizing.home_acts:
            for unit in SAVED_UNITS[self.sizing.levels[act]]:
                tensor = slots.saved_tensor(unit, layer, chunk)
                home = slots.home_of_saved(unit, act)
                self._copy(OUTBOUND, tensor, slots.saved(unit, act), home)

    def _backward_layer(self, round_: int, layer: int) -> None:
        """A layer begins, with its recompute, when its gradients' block is ready for it."""
        sizing = self.sizing
        for chunk in reversed(range(self.chunks)):
            self._backward_chunk(round_, layer, chunk)
        stays = round_ == self.rounds - 1 and layer < sizing.grad_blocks
        below = layer - sizing.grad_blocks
        if not stays:
            self._gradient_ready[round_, below] = self._store("grad", layer)
        if round_ and below >= 0:
            self._gradient_ready[round_, below] = self._load("grad", below)
        if layer >= sizing.param_blocks:
            self._load("param", layer - sizing.param_blocks)

    def _backward_chunk(self, round_: int, layer: int, chunk: int) -> None:
        act, sizing = layer * self.chunks + chunk, self.sizing
        level = sizing.levels[act] if act < sizing.home_acts else SavedLevel.FULL
        if level is not SavedLevel.FULL:
            name = f"r{round_}.block.{layer}.{chunk}.recompute.{level.name}"
            self._compute(self._recomputes[name], layer, chunk)
            if chunk == self.chunks - 1 and (ready := self._gradient_ready.get((round_, layer))):
                self.also_waits[name] = ready
        self._compute(next(self._tasks), layer, chunk)
        below = act - self.per_sequence
        if below >= 0 and self.per_sequence < sizing.device_acts:
            self._copy_context(below)
        elif below >= 0:
            self._fetch_context(below)
        ahead = act - sizing.device_acts
        if ahead >= 0:
            for unit in SAVED_UNITS[sizing.levels[ahead]]:
                tensor = self.slots.saved_tensor(unit, *divmod(ahead, self.chunks))
                home = self.slots.home_of_saved(unit, ahead)
                self._copy(INBOUND, tensor, home, self.slots.saved(unit, ahead))

    def _copy_context(self, act: int) -> None:
        """K and V of a chunk go where the later chunks of its sequence find them."""
        if self._is_context(act):
            tensor = self.slots.saved_tensor("kv", *divmod(act, self.chunks))
            self._copy(COMPUTE, tensor, self.slots.saved("kv", act), "device.context")

    def _fetch_context(self, act: int) -> None:
        if self._is_context(act):
            tensor = self.slots.saved_tensor("kv", *divmod(act, self.chunks))
            home = self.slots.home_of_saved("kv", act)
            self._copy(INBOUND_CONTEXT, tensor, home, "device.context")

    def _is_context(self, act: int) -> bool:
        return (act % self.chunks) % self.per_sequence < self.per_sequence - 1

    def _optimizer(self) -> None:
        """Every layer's update waits for the copies out of the one before."""
        sizing = self.sizing
        done = self.ops[-1].op_id
        for layer in range(sizing.num_optimizer_blocks):
            self._load_after("opt", layer, done)
        task: Task | None = next(self._tasks)
        while task is not None and task.label.layer is None:
            self._compute(task, None, None)
            task = next(self._tasks)
        for group in ("embedding", "head"):
            self._copy(OUTBOUND, f"param.{group}", f"device.param.{group}", f"host.param.{group}")
        before: str | None = None
        for layer in range(self.layers):
            if before is not None:
                assert task is not None, "every layer is updated"
                self.also_waits[task.task_id] = before
            while task is not None and task.label.layer == layer:
                self._compute(task, layer, None)
                task = next(self._tasks, None)
            self._store("param", layer)
            before = self._store("opt", layer)
            ahead = {
                "param": layer + sizing.param_blocks,
                "grad": layer + sizing.grad_blocks,
                "opt": layer + sizing.num_optimizer_blocks,
            }
            for kind, number in ahead.items():
                if number < self.layers:
                    self.also_waits[self._load(kind, number)] = before
        for layer in range(min(sizing.param_blocks, self.layers - sizing.param_blocks)):
            self._load("param", layer)

    def _load(self, kind: str, layer: int) -> str:
        return self._copy(
            INBOUND, f"{kind}.{layer}", f"host.{kind}.{layer}", self.slots.block(kind, layer)
        )

    def _load_after(self, kind: str, layer: int, op_id: str) -> None:
        self.also_waits[self._load(kind, layer)] = op_id

    def _store(self, kind: str, layer: int) -> str:
        return self._copy(
            OUTBOUND, f"{kind}.{layer}", self.slots.block(kind, layer), f"host.{kind}.{layer}"
        )

    def _copy(self, stream: Stream, tensor: str, source: str, destination: str) -> str:
        key = f"{stream.queue}.{tensor}"
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        self.ops.append(
            Copy(
                op_id=f"{key}.{number}",
                stream=stream,
                tensor=tensor,
                version=self._versions.get(tensor, 0),
                source=source,
                destination=destination,
            )
        )
        return f"{key}.{number}"

    def _feed(self, tensor: str, version: int) -> None:
        fed = self._inputs[tensor, version]
        self.ops.append(
            Feed(
                op_id=f"feed.{tensor}.{version}", stream=HOST_QUEUE, tensor=tensor,
                version=version, slot=f"host.{tensor}", source=fed.source, index=fed.index,
            )
        )  # fmt: skip
        self._versions[tensor] = version
        self._copy(INBOUND_TOKENS, tensor, f"host.{tensor}", f"device.{tensor}")

    def _fetch_loss(self) -> None:
        (wanted,) = self.chain.outputs
        tensor, version = wanted.tensor, wanted.version
        self._copy(OUTBOUND_LOSS, tensor, f"device.{tensor}", f"host.{tensor}")
        self.ops.append(
            Fetch(
                op_id=f"fetch.{tensor}", stream=HOST_QUEUE, tensor=tensor, version=version,
                slot=f"host.{tensor}", sink=wanted.sink,
            )
        )  # fmt: skip

    def _compute(
        self, task: Task, layer: int | None, chunk: int | None, hidden: str | None = None
    ) -> None:
        operands = tuple(
            Operand.model_construct(
                **operand.__dict__,
                slot=hidden
                if hidden is not None and operand.name == "hidden"
                else self._slot(operand.name, operand.tensor, layer, chunk),
            )
            for operand in task.operands
        )
        for operand in task.operands:
            if operand.mode in ("write", "update"):
                made = operand.version + (operand.mode == "update")
                self._versions[operand.tensor] = made
                if parent := self.slots.tensors[operand.tensor].parent:
                    self._versions[parent] = made
        self.ops.append(
            Compute(
                op_id=task.task_id, stream=COMPUTE, task=task.task_id, call=task.call,
                operands=operands, label=task.label,
            )
        )  # fmt: skip

    def _slot(self, name: str, tensor: str, layer: int | None, chunk: int | None) -> str:
        """Slot of a task's operand, from its name and what layer and chunk the task is about."""
        kind, _, rest = tensor.partition(".")
        if kind in ("param", "grad", "opt"):
            group = rest.split(".")[0]  # without the number of a part
            if group.isdigit():
                return self.slots.block(kind, int(group))
            return f"device.{kind}.{group}"
        if kind in ("step_state", "loss", "tokens"):
            return f"device.{tensor}"
        if kind == "scratch":
            return "device.scratch"
        if kind == "d_hidden":
            return self.slots.d_hidden(int(rest))
        if name in ("context", "d_context"):
            return f"device.{name}"
        if layer is None or name == "output":
            of_layer, of_chunk = rest.split(".")
            return self.slots.hidden(int(of_layer), int(of_chunk))
        assert chunk is not None
        unit = "input" if name in ("hidden", "norms") else name
        return self.slots.saved(unit, layer * self.chunks + chunk)
