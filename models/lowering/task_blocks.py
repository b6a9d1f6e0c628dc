"""A stage's blocks by our own kernels: each is one task for a direction and chunk.

The tasks are those of the whole step's chain (`lower`), by the same kernels and in an order that
adds up gradients as one device does, so that a pipeline gives one device's bits. A microbatch is a
round of the workload; all have names of their own here, since several are alive at a time: of
round r chunk c is chunk r x chunks_per_round + c.
"""

from typing import ClassVar

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.lowering.decoder import DecoderLowering
from twinstream.models.lowering.stage import run_stage
from twinstream.models.lowering.stage_cut import StageCut, StageShapes
from twinstream.models.lowering.stage_optimizer import StageOptimizer
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import TaskOperand
from twinstream.schedule.tensors import Tensor
from twinstream.schedule.workload import Workload

Message = tuple[str, TaskOperand]
_PLACES = ("device", "device_after_backward")


class StageError(TwinstreamError):
    """A recipe that a pipeline cannot train with."""


class TaskBlocks(DecoderLowering):
    """Adds the tasks of a stage of a training step or, of a workload that is forward only, of an
    evaluation: its tasks are named as those of the step's first microbatch.

    Raises:
        StageError: the recipe has its optimizer on the host or before the next use, which only
            one device does yet.
    """

    shapes: StageShapes
    groups: StageOptimizer
    shapes_kind: ClassVar[type[StageShapes]] = StageShapes
    groups_kind: ClassVar[type[StageOptimizer]] = StageOptimizer
    updates_a_layer = 1  # of a gradient of hidden states, by the tasks of a layer

    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> None:
        _require_simple(spec, recipe, cut)
        self._chunks_each = workload.chunks_per_round
        whole = workload.model_copy(
            update={
                "chunks_per_round": workload.chunks_per_round * workload.rounds_per_step,
                "rounds_per_step": 1,
            }
        )
        super().__init__(spec, whole, recipe, self.shapes_kind(spec, whole, recipe, cut=cut))
        self.cut, self.has_head = cut, cut.last
        self._microbatch = 0
        self._completes = False

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what the stage's tasks use, and its state."""
        return self._used_tensors()

    def _add_tasks(self, step_state: TaskOperand) -> None:
        told = self.builder, self.shapes, self.recipe, step_state, self.cut
        self.groups = self.groups_kind(*told)
        self.optimizer = self.groups
        self.round_starts.append(0)
        run_stage(self.cut, self, trains=self._trains)

    def begin(self, chunk: int, j: int) -> None:
        """Feed a microbatch: what another virtual stage of the rank has not been fed already."""
        self._microbatch = j
        place = self.cut.places[chunk]
        has_head = place == self.cut.num_places - 1
        unread = set() if has_head else {"reference"} | ({"tokens"} if place else set())
        for one in self._chunks():
            for source in self._sources:
                if source not in unread and not self.builder.latest(f"{source}.{one}"):
                    self._feed(source, one, one)

    def embed_forward(self, chunk: int, j: int) -> None:
        self.groups.use(self.shapes.of_embedding, j)
        self._embed_forward(0)

    def hidden_in(self, chunk: int, j: int) -> list[Message]:
        start = self.cut.spans[chunk].start
        return [self.builder.incoming(self.shapes.hidden(start, one), 1) for one in self._chunks()]

    def forward(self, chunk: int, j: int) -> None:
        for layer in self.cut.spans[chunk]:
            self.groups.use(self.shapes.of_layer(layer), j)
            self._forward_layer(0, layer)

    def hidden_out(self, chunk: int, j: int) -> list[Message]:
        stop = self.cut.spans[chunk].stop
        return [self.builder.outgoing(self.shapes.hidden(stop, one)) for one in self._chunks()]

    def head(self, chunk: int, j: int) -> None:
        self._begin_backward(chunk, j)
        self.groups.use(self.shapes.of_head, j)
        self._head(0)

    def other_phase(self, phase: str, chunk: int, j: int) -> None:
        assert phase == "evaluate", "a block's one task makes all its gradients"
        self._microbatch = j
        self.groups.use(self.shapes.of_head, j)
        self._head_alone(self.groups.step_state)

    def gradient_in(self, chunk: int, j: int) -> list[Message]:
        self._begin_backward(chunk, j)
        stop = self.cut.spans[chunk].stop
        if not self._goes_below(stop):
            return []
        # as many as there are tasks that make it anew: the head's, and those of later layers
        version = 1 + self.updates_a_layer * (self.spec.num_layers - stop)
        return [
            self.builder.incoming(f"d_hidden.{one}", version) for one in self._chunks_reversed()
        ]

    def backward(self, chunk: int, j: int) -> None:
        for layer in reversed(self.cut.spans[chunk]):
            if layer >= self.first_backward:
                self.groups.use(self.shapes.of_layer(layer), j)
                self._backward_layer(0, layer)

    def gradient_out(self, chunk: int, j: int) -> list[Message]:
        if not self._goes_below(self.cut.spans[chunk].start):
            return []
        return [self.builder.outgoing(f"d_hidden.{one}") for one in self._chunks_reversed()]

    def embed_backward(self, chunk: int, j: int) -> None:
        if self.trains_embedding:
            self._embed_backward(0)

    def _begin_backward(self, chunk: int, j: int) -> None:
        self._microbatch, self._completes = j, self.cut.completes(chunk, j)

    def _chunks(self) -> range:
        each = self._chunks_each
        return range(self._microbatch * each, (self._microbatch + 1) * each)

    def _goes_below(self, layer: int) -> bool:
        """Return whether anything before a layer is trained."""
        return self.first_backward < layer or self.trains_embedding

    def _gradient_of(self, group: str, chunk: int, name: str = "gradients") -> list[TaskOperand]:
        """Where a chunk's contribution to a group's gradient is added to."""
        return self._gradient(name, group, 0)

    def _after_group(self, group: str, round_: int) -> None:
        if self._completes:
            super()._after_group(group, round_)


def _require_simple(spec: ModelSpec, recipe: Recipe, cut: StageCut) -> None:
    reasons = {
        f"the optimizer '{recipe.optimizer}'": recipe.optimizer not in _PLACES,
        "Muon, whose matrices are whole, sharded by ZeRO": recipe.update == "muon"
        and bool(cut.layout.zero and cut.layout.dp > 1),
        "a load-balancing loss of experts (leave it out with --aux-loss 0)": bool(
            spec.experts and spec.experts.aux_loss
        ),
    }
    if found := [name for name, wanted in reasons.items() if wanted]:
        raise StageError(f"stages of a pipeline cannot train with {' and '.join(found)} yet")
