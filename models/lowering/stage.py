"""Lower one stage of a pipeline to the task chain of a step: its layers, and what it says.

The tasks are those of the whole step's chain (`lower`), by the same kernels and in an order that
adds up gradients as one device does, so that a pipeline gives one device's bits. A microbatch is a
round of the workload; all have names of their own here, since several are alive at a time: of
round r chunk c is chunk r x chunks_per_round + c.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from twinstream.models.demand.attention_library import library_bytes
from twinstream.models.flops import model_flops_per_step
from twinstream.models.lowering.declarations import Shapes, declare_tensors
from twinstream.models.lowering.lower import StepLowering, model_ref, settled
from twinstream.models.lowering.optimizer_tasks import OptimizerTasks
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.models.trained import layer_of
from twinstream.schedule.chain import Chain, Input, Output, Task
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Attribute, KernelCall, Label, TaskOperand
from twinstream.schedule.tensors import Tensor
from twinstream.schedule.workload import Workload

COMMUNICATE = "communicate"  # the kernel of tasks that become `Communicate` ops


@dataclass(frozen=True)
class StageCut:
    """One stage: `spans` are the layers of its virtual stages, `places` which ones they are.

    `actions` say what it runs, in order: forward or backward, which of its virtual stages, which
    microbatch. `replicas` are axes of a mesh over which gradients are summed.
    """

    spans: tuple[range, ...]
    places: tuple[int, ...]
    num_places: int
    actions: tuple[tuple[str, int, int], ...]
    replicas: tuple[str, ...] = ()

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return 0 in self.places

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.num_places - 1 in self.places


class StageError(TwinstreamError):
    """A recipe that a pipeline cannot train with."""


def lower_stage(spec: ModelSpec, workload: Workload, recipe: Recipe | None, cut: StageCut) -> Chain:
    """The chain of one stage of a training step.

    Raises:
        StageError: the recipe clips, freezes, has adapters or its optimizer on the host, or the
            model's embeddings are tied, which only one device does yet.
    """
    recipe = settled(recipe or Recipe())
    _require_simple(spec, recipe)
    lowering = _StageLowering(spec, workload, recipe, cut)
    lowering.run()
    builder = lowering.builder
    used = {operand.tensor for task in builder.tasks for operand in task.operands}
    used |= {o.tensor for again in builder.recomputes for o in again.task.operands}
    used.update(lowering.shapes.persistent)
    return Chain(
        tensors=_used_tensors(builder.tensors, used),
        calls=builder.calls,
        tasks=tuple(builder.tasks),
        recomputes=tuple(builder.recomputes),
        inputs=tuple(builder.inputs),
        outputs=tuple(builder.outputs),
        persistent=lowering.shapes.persistent,
        round_starts=(0,),
        workload=lowering.workload,
        model=model_ref(spec),
        recipe=recipe.model_dump(mode="json"),
        model_flops=model_flops_per_step(spec, workload, recipe),
        library_bytes=max(map(library_bytes, lowering.kernel_calls()), default=0),
    )


def _require_simple(spec: ModelSpec, recipe: Recipe) -> None:
    reasons = {
        "tied embeddings": spec.tied_embeddings,
        "clipped gradients": recipe.clips,
        "adapters (LoRA)": recipe.lora is not None,
        "frozen weights": bool(recipe.frozen),
        f"the optimizer '{recipe.optimizer}'": recipe.optimizer != "device",
    }
    if found := [name for name, wanted in reasons.items() if wanted]:
        raise StageError(f"stages of a pipeline cannot train with {' and '.join(found)} yet")


def _used_tensors(declared: Sequence[Tensor], used: set[str]) -> tuple[Tensor, ...]:
    """What tasks use, with the whole of it where they use a part."""
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in declared}
    kept = {roots[name] for name in used}
    return tuple(tensor for tensor in declared if roots[tensor.tensor_id] in kept)


class _StageShapes(Shapes):
    """The groups of a stage alone."""

    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> None:
        super().__init__(spec, workload, recipe)
        layers = {layer for span in cut.spans for layer in span}
        object.__setattr__(self, "_own", (layers, cut.first, cut.last))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Of the embedding, its layers and the head those that the stage has."""
        layers, first, last = self._own  # type: ignore[attr-defined]
        ends = {"embedding": first, "head": last}
        return tuple(
            group
            for group in Shapes.groups.fget(self)  # type: ignore[attr-defined]
            if (layer_of(group) in layers if layer_of(group) is not None else ends[group])
        )

    @property
    def trained(self) -> tuple[str, ...]:
        """All of them."""
        return self.groups


class _StageLowering(StepLowering):
    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> None:
        self._chunks_each = workload.chunks_per_round
        whole = workload.model_copy(
            update={
                "chunks_per_round": workload.chunks_per_round * workload.rounds_per_step,
                "rounds_per_step": 1,
            }
        )
        super().__init__(spec, whole, recipe)
        self.cut = cut
        self.shapes = _StageShapes(spec, whole, recipe, cut)
        self._microbatch = 0
        self._completes = False
        self._last = {chunk: j for phase, chunk, j in cut.actions if phase == "backward"}

    def run(self) -> None:
        builder, cut = self.builder, self.cut
        declare_tensors(builder, self.shapes)
        builder.inputs.append(Input(tensor="step_state", version=1, source="step_state", index=0))
        state = builder.write("step_state", "step_state").model_copy(update={"mode": "read"})
        self.optimizer = OptimizerTasks(builder, self.shapes, self.recipe, state)
        self.round_starts.append(0)
        for phase, chunk, j in cut.actions:
            self._microbatch = j
            (self._forward_of if phase == "forward" else self._backward_of)(chunk, j)
        if cut.last:
            loss = builder.read("loss", "loss")
            builder.outputs.append(Output(tensor="loss", version=loss.version, sink="loss"))

    def kernel_calls(self) -> list[KernelCall]:
        """The calls that are of kernels."""
        return [call for call in self.builder.calls.values() if call.kernel != COMMUNICATE]

    def _chunks(self) -> range:
        each = self._chunks_each
        return range(self._microbatch * each, (self._microbatch + 1) * each)

    def _forward_of(self, chunk: int, j: int) -> None:
        span, place = self.cut.spans[chunk], self.cut.places[chunk]
        self._feed(place)
        if place == 0:
            self._embed_forward(0)
        else:
            for one in self._chunks():
                self._receive(self.shapes.hidden(span.start, one), 1, -1)
        for layer in span:
            self._forward_layer(0, layer)
        if place < self.cut.num_places - 1:
            for one in self._chunks():
                self._send(self.shapes.hidden(span.stop, one), 1)

    def _backward_of(self, chunk: int, j: int) -> None:
        span, place = self.cut.spans[chunk], self.cut.places[chunk]
        self._completes = self._last[chunk] == j
        if place == self.cut.num_places - 1:
            self._head(0)
        else:
            # as many as there are tasks that make it anew: the head's, and those of later layers
            version = 1 + self.spec.num_layers - span.stop
            for one in self._chunks_reversed():
                self._receive(f"d_hidden.{one}", version, 1)
        for layer in reversed(span):
            self._backward_layer(0, layer)
        if place == 0:
            self._embed_backward(0)
        else:
            for one in self._chunks_reversed():
                self._send(f"d_hidden.{one}", -1)

    def _feed(self, place: int) -> None:
        sources = ["tokens"] if place in (0, self.cut.num_places - 1) else []
        sources += ["sequences"] if self.workload.packing else []
        for one in self._chunks():
            for source in sources:
                if self.builder.latest(f"{source}.{one}"):  # another virtual stage has it
                    continue
                fed = self.builder.write(source, f"{source}.{one}")
                self.builder.inputs.append(
                    Input(tensor=fed.tensor, version=fed.version, source=source, index=one)
                )

    def _after_group(self, group: str, round_: int) -> None:
        """What follows a group's last contribution: its sum over replicas, its update."""
        if not self._completes or group not in self.trained:
            return
        if self.cut.replicas:
            self._sum_over_replicas(group)
        self.optimizer.after_group(group, 0)

    def _sum_over_replicas(self, group: str) -> None:
        attributes: dict[str, Attribute] = {
            "collective": "all_reduce", "axes": " ".join(self.cut.replicas), "queue": "dp",
            "reduction": "rank_order",
        }  # fmt: skip
        operand = self.builder.update("gradients", f"grad.{group}")
        self._communicate(f"reduce.{group}", attributes, [operand], "reduce_gradients")

    def _send(self, tensor: str, shift: int) -> None:
        queue = "send.next" if shift > 0 else "send.prev"
        attributes: dict[str, Attribute] = {
            "collective": "send", "axes": "pp", "shift": shift, "queue": queue,
        }  # fmt: skip
        told = self.builder.read("hidden", tensor)
        self._communicate(f"send.{tensor}.v{told.version}", attributes, [told], "send")

    def _receive(self, tensor: str, version: int, shift: int) -> None:
        queue = "recv.next" if shift > 0 else "recv.prev"
        attributes: dict[str, Attribute] = {
            "collective": "recv", "axes": "pp", "shift": shift, "queue": queue,
        }  # fmt: skip
        self.builder.begin_at(tensor, version - 1)
        heard = self.builder.write("hidden", tensor)
        self._communicate(f"recv.{tensor}.v{heard.version}", attributes, [heard], "recv")

    def _communicate(
        self, task_id: str, attributes: dict[str, Attribute], operands: list[TaskOperand], kind: str
    ) -> None:
        call = f"{COMMUNICATE}.{attributes['queue']}"
        self.builder.calls.setdefault(
            call, KernelCall(kernel=COMMUNICATE, attributes=attributes, cost=())
        )
        label = Label(kind=kind, round=self._microbatch)
        self.builder.tasks.append(
            Task(task_id=task_id, call=call, operands=tuple(operands), label=label)
        )
