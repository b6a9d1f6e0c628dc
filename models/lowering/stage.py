"""Lower one stage of a pipeline to the task chain of a step: its layers, and what it says.

The tasks are those of the whole step's chain (`lower`), by the same kernels and in an order that
adds up gradients as one device does, so that a pipeline gives one device's bits. A microbatch is a
round of the workload; all have names of their own here, since several are alive at a time: of
round r chunk c is chunk r x chunks_per_round + c.
"""

from collections.abc import Sequence
from dataclasses import replace

from twinstream.models.flops import model_flops_per_step
from twinstream.models.kernel_costs.workspace import library_bytes
from twinstream.models.lowering.communication_tasks import ParameterGathers
from twinstream.models.lowering.declarations import declare_groups, declare_step
from twinstream.models.lowering.decoder import DecoderLowering
from twinstream.models.lowering.settled import require_pairs, settled
from twinstream.models.lowering.sharding import declare_shards
from twinstream.models.lowering.stage_cut import StageCut, StageShapes
from twinstream.models.lowering.stage_optimizer import ShardedOptimizer, StageOptimizer
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.chain import COMMUNICATE, Chain, Input, Output
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import KernelCall, TaskOperand
from twinstream.schedule.tensors import Tensor
from twinstream.schedule.workload import Workload

_PLACES = ("device", "device_after_backward")


class StageError(TwinstreamError):
    """A recipe that a pipeline cannot train with."""


def lower_stage(spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> Chain:
    """The chain of one stage of a training step or, of a workload that is forward only, of an
    evaluation: its tasks are named as those of the step's first microbatch.

    Raises:
        StageError: the recipe has its optimizer on the host or before the next use, which only
            one device does yet.
    """
    recipe = settled(recipe)
    require_pairs(spec, workload, recipe)
    _require_simple(spec, recipe, cut)
    cut = replace(cut, tied=spec.tied_embeddings)
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
        inputs=tuple(fed for fed in builder.inputs if fed.tensor in used),
        outputs=tuple(builder.outputs),
        persistent=lowering.shapes.persistent,
        round_starts=(0,),
        workload=lowering.workload,
        model=spec.ref(),
        recipe=recipe.model_dump(mode="json"),
        model_flops=model_flops_per_step(spec, workload, recipe),
        library_bytes=max(map(library_bytes, lowering.kernel_calls()), default=0),
    )


def _require_simple(spec: ModelSpec, recipe: Recipe, cut: StageCut) -> None:
    reasons = {
        f"the optimizer '{recipe.optimizer}'": recipe.optimizer not in _PLACES,
        "Muon, whose matrices are whole, sharded by ZeRO": recipe.update == "muon"
        and cut.sharding is not None,
        "a load-balancing loss of experts (leave it out with --aux-loss 0)": bool(
            spec.experts and spec.experts.aux_loss
        ),
    }
    if found := [name for name, wanted in reasons.items() if wanted]:
        raise StageError(f"stages of a pipeline cannot train with {' and '.join(found)} yet")


def _used_tensors(declared: Sequence[Tensor], used: set[str]) -> tuple[Tensor, ...]:
    """What tasks use, with the whole of it where they use a part."""
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in declared}
    kept = {roots[name] for name in used}
    return tuple(tensor for tensor in declared if roots[tensor.tensor_id] in kept)


class _StageLowering(DecoderLowering):
    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> None:
        self._chunks_each = workload.chunks_per_round
        whole = workload.model_copy(
            update={
                "chunks_per_round": workload.chunks_per_round * workload.rounds_per_step,
                "rounds_per_step": 1,
            }
        )
        self.shapes: StageShapes
        super().__init__(spec, whole, recipe, StageShapes(spec, whole, recipe, cut=cut))
        self.cut = cut
        self._microbatch = 0
        self._completes = False
        self._gathers: ParameterGathers | None = None
        self._last = {chunk: j for phase, chunk, j in cut.actions if phase == "backward"}

    def run(self) -> None:
        builder, cut = self.builder, self.cut
        if cut.sharding is None:
            declare_groups(builder, self.shapes)
        else:
            declare_shards(builder, self.shapes, cut.sharding)
        declare_step(builder, self.shapes)
        builder.inputs.append(Input(tensor="step_state", version=1, source="step_state", index=0))
        state = builder.write("step_state", "step_state").model_copy(update={"mode": "read"})
        self._state = state
        self.optimizer = self._updates = self._optimizer(state)
        if cut.sharding is not None and cut.sharding.zero == 3:
            communications = self._updates.communications
            self._gathers = ParameterGathers(communications, cut.sharding, self.shapes.uses)
        self.round_starts.append(0)
        run = {
            "forward": self._forward_of, "backward": self._backward_of, "evaluate": self._evaluate
        }  # fmt: skip
        for phase, chunk, j in cut.actions:
            self._microbatch = j
            run[phase](chunk, j)
        trains = not self.workload.forward_only
        if trains:
            self._updates.finish()
        results = ("loss", *(("grad_norm",) if self.recipe.clips and trains else ()))
        for name in results if cut.last else ():
            version = builder.read(name, name).version
            builder.outputs.append(Output(tensor=name, version=version, sink=name))

    def _optimizer(self, state: TaskOperand) -> StageOptimizer:
        told = self.builder, self.shapes, self.recipe, state, self.cut
        if self.cut.sharding is None:
            return StageOptimizer(*told)
        return ShardedOptimizer(*told)

    def _use(self, groups: tuple[str, ...]) -> None:
        if self._gathers is not None:
            self._gathers.use(groups, self._microbatch)

    def _embed_forward(self, round_: int) -> None:
        self._use(("embedding",))
        super()._embed_forward(round_)

    def _forward_layer(self, round_: int, layer: int) -> None:
        self._use(self.shapes.of_layer(layer))
        super()._forward_layer(round_, layer)

    def _head(self, round_: int) -> None:
        self._use(self.shapes.of_head)
        super()._head(round_)

    def _backward_layer(self, round_: int, layer: int) -> None:
        self._use(self.shapes.of_layer(layer))
        super()._backward_layer(round_, layer)

    def kernel_calls(self) -> list[KernelCall]:
        """The calls that are of kernels."""
        return [call for call in self.builder.calls.values() if call.kernel != COMMUNICATE]

    def _chunks(self) -> range:
        each = self._chunks_each
        return range(self._microbatch * each, (self._microbatch + 1) * each)

    def _forward_of(self, chunk: int, j: int) -> None:
        span, place = self.cut.spans[chunk], self.cut.places[chunk]
        says = self._updates.communications
        self._feed(place)
        if place == 0:
            self._embed_forward(0)
        else:
            for one in self._chunks():
                says.receive(self.shapes.hidden(span.start, one), 1, -1, j)
        for layer in span:
            self._forward_layer(0, layer)
        if place < self.cut.num_places - 1:
            for one in self._chunks():
                says.send(self.shapes.hidden(span.stop, one), 1, j)

    def _evaluate(self, chunk: int, j: int) -> None:
        """Of a chunk that ends with the head."""
        self._use(self.shapes.of_head)
        self._head_alone(self._state)

    def _backward_of(self, chunk: int, j: int) -> None:
        span, place = self.cut.spans[chunk], self.cut.places[chunk]
        says = self._updates.communications
        self._completes = self._last[chunk] == j
        if place == self.cut.num_places - 1:
            self._head(0)
        elif self._goes_below(span.stop):
            # as many as there are tasks that make it anew: the head's, and those of later layers
            version = 1 + self.spec.num_layers - span.stop
            for one in self._chunks_reversed():
                says.receive(f"d_hidden.{one}", version, 1, j)
        for layer in reversed(span):
            if layer >= self.first_backward:
                self._backward_layer(0, layer)
        if place == 0 and "embedding" in self.trained:
            self._embed_backward(0)
        elif place > 0 and self._goes_below(span.start):
            for one in self._chunks_reversed():
                says.send(f"d_hidden.{one}", -1, j)

    def _goes_below(self, layer: int) -> bool:
        """Whether anything before a layer is trained."""
        return self.first_backward < layer or "embedding" in self.trained

    def _feed(self, place: int) -> None:
        has_head = place == self.cut.num_places - 1
        unread = set() if has_head else {"reference"} | ({"tokens"} if place else set())
        sources = [source for source in self._sources if source not in unread]
        for one in self._chunks():
            for source in sources:
                if self.builder.latest(f"{source}.{one}"):  # another virtual stage has it
                    continue
                fed = self.builder.write(source, f"{source}.{one}")
                self.builder.inputs.append(
                    Input(tensor=fed.tensor, version=fed.version, source=source, index=one)
                )

    def _after_group(self, group: str, round_: int) -> None:
        """What follows a group's last contribution."""
        if self._completes and group in self.trained:
            self._updates.after_group(group, 0)
