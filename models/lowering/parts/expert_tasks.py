"""A stage's blocks whose experts ranks share: rows go to the ranks that have their experts.

A block is three tasks in forward, of a chunk one after the other: up to the choice of experts; a
rank's experts on the rows that have come from all ranks; what follows. Between them are two
all-to-alls. Backward has as many, and sends the block's rows once more, so that nothing of what
comes is kept. Tasks of one chunk run while another's rows are on their way.

A slot for rows that come has room for all rows of all ranks: all might choose one rank's experts,
and no row is ever dropped. What is sent are the rows that there are.
"""

from collections.abc import Callable, Sequence

from twinstream.models.decoders.parted import SharedSpec
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import EXPERTS, PART
from twinstream.models.lowering.chain_builder import CollectiveCall
from twinstream.models.lowering.declarations import dense_tensor
from twinstream.models.lowering.decoder_calls import KernelCalls
from twinstream.models.lowering.parts.part_tasks import PartTasks
from twinstream.models.lowering.parts.ring_tasks import RingTasks
from twinstream.models.lowering.parts.sequence_tasks import SequenceTasks
from twinstream.models.lowering.stage_cut import StageCut
from twinstream.models.lowering.task_blocks import TaskBlocks
from twinstream.models.recipes.adapter_layout import adapter_group
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.ops import TaskOperand
from twinstream.schedule.workload import Workload

CAME = "came_"  # begins the name of what other ranks send
_SENT = {name: f"{CAME}{name}" for name in ("rows", "d_rows", "row_weights")}


class RowExchange(TaskBlocks):
    """Adds what a rank's experts do with rows of all ranks, and how these come and go back."""

    def _declare(self) -> None:
        super()._declare()
        spec, experts, ep = self.spec, self.spec.experts, self.cut.layout.ep
        assert experts is not None
        rows = self.workload.chunk_tokens * experts.per_token
        shapes = {"rows": (spec.d_model,), "d_rows": (spec.d_model,), "row_weights": ()}
        for chunk in range(self.workload.chunks_per_round):
            for name, width in shapes.items():
                dtype = "float32" if name == "row_weights" else spec.dtype
                for tensor, count in ((name, rows), (_SENT[name], ep * rows)):
                    shape = (count, *width)
                    made = dense_tensor(f"{tensor}.{chunk}", "scratch", dtype, shape)
                    self.builder.declare(made)
            own = dense_tensor(f"own_counts.{chunk}", "scratch", "int32", (experts.count,))
            self.builder.declare(own)
            for layer in range(spec.num_layers):
                shape = (ep, experts.count)
                counts = dense_tensor(f"counts.{layer}.{chunk}", "activation", "int32", shape)
                self.builder.declare(counts)

    def _keeps_experts(self, layer: int) -> bool:
        return False

    def _tell(self, layer: int, chunk: int) -> None:
        """How many rows each expert gets, and then the rows."""
        builder = self.builder
        own = builder.read("own", f"own_counts.{chunk}")
        counted = [own, builder.write("all", f"counts.{layer}.{chunk}")]
        self._say("counts", "all_gather", counted, layer, chunk)
        self._send("dispatch", ("rows",), layer, chunk)

    def _experts_forward(self, layer: int, chunk: int) -> None:
        builder = self.builder
        rows = builder.update("rows", f"{_SENT['rows']}.{chunk}")
        operands = [*self._experts(layer, chunk), rows]
        call = self.calls.block("experts_forward", chunk, layer)
        self._add("experts_forward", call, operands, round_=0, layer=layer, chunk=chunk)
        self._send("combine", ("rows",), layer, chunk, back=True)

    def _dispatch_backward(
        self, kernel: str, layer: int, chunk: int, operands: list[TaskOperand]
    ) -> None:
        """Send normed rows, gradients of what comes of them, and what they count."""
        builder = self.builder
        operands = [
            *operands,
            builder.read("d_hidden", f"d_hidden.{chunk}"),
            *(builder.write(name, f"{name}.{chunk}") for name in _SENT),
        ]
        call = self.calls.block(kernel, chunk, layer)
        self._add(kernel, call, operands, round_=0, layer=layer, chunk=chunk)
        self._send("dispatch_backward", tuple(_SENT), layer, chunk)

    def _experts_backward(self, layer: int, chunk: int) -> None:
        builder = self.builder
        came = [
            builder.operand(name, f"{tensor}.{chunk}", "read" if name == "rows" else "update")
            for name, tensor in _SENT.items()
        ]
        groups = (
            (self._experts_group(layer), "expert_gradients"),
            (f"{adapter_group(layer)}{EXPERTS}", "adapter_gradients"),
        )
        gradients = [one for group, name in groups for one in self._gradient_of(group, chunk, name)]
        operands = [*self._experts(layer, chunk), *came, *gradients]
        call = self.calls.block("experts_backward", chunk, layer, frozen=self._frozen(layer))
        self._add("experts_backward", call, operands, round_=0, layer=layer, chunk=chunk)
        self._send("combine_backward", ("d_rows", "row_weights"), layer, chunk, back=True)

    def _expert_projections(self, layer: int, chunk: int) -> list[TaskOperand]:
        """Gradients of rows and of what they count, as they came back."""
        if not self.shapes.with_experts(layer):
            return []
        read = self.builder.read
        return [read("rows", f"d_rows.{chunk}"), read("row_weights", f"row_weights.{chunk}")]

    def _experts_group(self, layer: int) -> str:
        return f"{layer}{EXPERTS}"

    def _experts(self, layer: int, chunk: int) -> list[TaskOperand]:
        """A rank's experts, their adapters, and how many rows of each come from each rank."""
        read, parameters = self.builder.read, self.shapes.parameters
        found = [read("experts", parameters(self._experts_group(layer)))]
        if (adapters := f"{adapter_group(layer)}{EXPERTS}") in self.shapes.groups:
            found.append(read("adapters", parameters(adapters)))
        return [*found, read("counts", f"counts.{layer}.{chunk}")]

    def _send(
        self, what: str, names: Sequence[str], layer: int, chunk: int, *, back: bool = False
    ) -> None:
        """Rows, and what belongs to each, to the ranks that have their experts; or back."""
        for name in names:
            ends = (f"{name}.{chunk}", f"{_SENT[name]}.{chunk}")
            source, target = ends[::-1] if back else ends
            operands = [
                self.builder.read("given", source),
                self.builder.write("taken", target),
                self.builder.read("counts", f"counts.{layer}.{chunk}"),
            ]
            self._say(f"{what}.{name}", "all_to_all", operands, layer, chunk)

    def _say(
        self, what: str, collective: str, operands: list[TaskOperand], layer: int, chunk: int
    ) -> None:
        said = CollectiveCall(collective, ("ep",), "ep")
        label = self.builder.label("ep", layer, chunk)
        self.builder.communicate(f"ep.{what}.{layer}.{chunk}", said, operands, label)


class ExpertTasks(RowExchange):
    """Adds the tasks of a stage of a training step, or of an evaluation, with shared experts."""

    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> None:
        super().__init__(SharedSpec.of(spec, cut.layout.ep), workload, recipe, cut)
        self.calls = KernelCalls(self.builder, self.spec, self.workload, recipe, cut.layout)

    def _forward_layer(self, round_: int, layer: int) -> None:
        if not self.shapes.with_experts(layer):
            super()._forward_layer(round_, layer)
            return
        _staggered(
            self._chunks(),
            (
                lambda chunk: self._forward_before(round_, layer, chunk),
                lambda chunk: self._experts_forward(layer, chunk),
                lambda chunk: self._forward_after(layer, chunk),
            ),
        )

    def _forward_before(self, round_: int, layer: int, chunk: int) -> None:
        self._block_forward(round_, layer, chunk)
        self._tell(layer, chunk)

    def _forward_after(self, layer: int, chunk: int) -> None:
        builder, read = self.builder, self.builder.read
        low = f"low.{layer}.{chunk}"
        operands = [
            *self._block_weights(layer),
            *([builder.update("low", low)] if self._has_low(layer) else []),
            *(read(name, f"{name}.{layer}.{chunk}") for name in ("norms", "routes", "projections")),
            read("rows", f"rows.{chunk}"),
            builder.write("output", self.shapes.hidden(layer + 1, chunk)),
        ]
        call = self.calls.block("block_combine_forward", chunk, layer)
        self._add("block_combine_forward", call, operands, round_=0, layer=layer, chunk=chunk)

    def _backward_layer(self, round_: int, layer: int) -> None:
        if not self.shapes.with_experts(layer):
            super()._backward_layer(round_, layer)
            return
        _staggered(
            self._chunks_reversed(),
            (
                lambda chunk: self._backward_before(layer, chunk),
                lambda chunk: self._experts_backward(layer, chunk),
                lambda chunk: self._block_backward(round_, layer, chunk),
            ),
        )
        self._after_layer(round_, layer)

    def _backward_before(self, layer: int, chunk: int) -> None:
        projections = self.builder.read("projections", f"projections.{layer}.{chunk}")
        operands = [*self._block_weights(layer), *self._block_scalars(layer, chunk), projections]
        self._dispatch_backward("block_dispatch_backward", layer, chunk, operands)

    def _block_inputs(self, layer: int, chunk: int) -> list[TaskOperand]:
        found = super()._block_inputs(layer, chunk)
        return [operand for operand in found if operand.name != "experts"]

    def _block_weights(self, layer: int) -> list[TaskOperand]:
        """What a task reads of a block that takes each token by itself."""
        names = ("parameters", "adapters")
        return [one for one in self._block_inputs(layer, 0) if one.name in names]

    def _block_output(self, layer: int, chunk: int) -> list[TaskOperand]:
        if not self.shapes.with_experts(layer):
            return super()._block_output(layer, chunk)
        write = self.builder.write
        return [write("rows", f"rows.{chunk}"), write("counts", f"own_counts.{chunk}")]

    def _expert_gradient(self, layer: int, round_: int) -> list[TaskOperand]:
        return []


class SharedPartTasks(RowExchange, PartTasks):
    """Adds the tasks of a stage of parts, one a rank, with shared experts.

    A rank sends rows to those of other replicas that have the same columns of their experts. What
    comes back goes into its piece; pieces are summed as ever.
    """

    def _forward_mlp(self, layer: int) -> None:
        if not self.shapes.with_experts(layer):
            super()._forward_mlp(layer)
            return
        _staggered(
            self._chunks(),
            (
                lambda chunk: self._dispatch_forward(layer, chunk),
                lambda chunk: self._experts_forward(layer, chunk),
                lambda chunk: self._combine_forward(layer, chunk),
            ),
        )

    def _dispatch_forward(self, layer: int, chunk: int) -> None:
        self._add_attention(layer, chunk)
        write = self.builder.write
        operands = [
            *self._mlp_inputs(layer, chunk, 0),
            *self._choice(layer, chunk),
            *self._gate_up(write, layer, chunk, 0),
            write("rows", f"rows.{chunk}"),
            write("counts", f"own_counts.{chunk}"),
        ]
        call = self.calls.block("mlp_part_dispatch_forward", chunk, layer)
        self._task("mlp_dispatch", chunk, layer, call, operands, 0)
        self._tell(layer, chunk)

    def _combine_forward(self, layer: int, chunk: int) -> None:
        read = self.builder.read
        operands = [
            *self._mlp_inputs(layer, chunk, 0),
            *self._routes(layer, chunk),
            *self._gate_up(read, layer, chunk, 0),
            read("rows", f"rows.{chunk}"),
            self._piece(chunk, 0),
        ]
        call = self.calls.block("mlp_part_combine_forward", chunk, layer)
        self._task("mlp_forward", chunk, layer, call, operands, 0)
        self._exchange_pieces("mlp", chunk, layer)

    def _backward_mlp(self, layer: int) -> None:
        if not self.shapes.with_experts(layer):
            super()._backward_mlp(layer)
            return
        _staggered(
            self._chunks_reversed(),
            (
                lambda chunk: self._dispatch_part_backward(layer, chunk),
                lambda chunk: self._experts_backward(layer, chunk),
                lambda chunk: self._combine_backward(layer, chunk),
            ),
        )

    def _dispatch_part_backward(self, layer: int, chunk: int) -> None:
        inputs = [*self._mlp_inputs(layer, chunk, 0), *self._routes(layer, chunk)]
        self._dispatch_backward("mlp_part_dispatch_backward", layer, chunk, inputs)

    def _combine_backward(self, layer: int, chunk: int) -> None:
        self._mlp_backward(layer, chunk, 0)
        self._exchange_pieces("mlp_backward", chunk, layer)

    def _experts_group(self, layer: int) -> str:
        return f"{layer}{EXPERTS}{PART}0"


class SharedSequenceTasks(SharedPartTasks, SequenceTasks):
    """The same of slices of every sequence."""


class SharedRingTasks(SharedPartTasks, RingTasks):
    """The same of slices whose keys and values go around a ring."""


def _staggered(chunks: range, stages: Sequence[Callable[[int], None]]) -> None:
    """Each chunk through all stages, one behind the next chunk's one before."""
    for step in range(len(chunks) + len(stages) - 1):
        for behind, stage in enumerate(stages):
            if 0 <= step - behind < len(chunks):
                stage(chunks[step - behind])
