"""What parts of a model have in common: sums over them, norms behind these, updates, and names."""

import zlib
from collections.abc import Callable, Iterator, Sequence

from twinstream.models.decoders.parted import PartedSpec
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attributes import QK_NORM_WIDTHS
from twinstream.models.kernel_costs.part_work import add_parts, norm_parts_backward
from twinstream.models.kernel_costs.work import gradient_norm_work
from twinstream.models.layout import HEAD, PART, qk_norm_widths, whole_group
from twinstream.models.lowering.chain_builder import CollectiveCall, by_rank
from twinstream.models.lowering.declarations import (
    GRADIENT_PIECES,
    OptimizerPart,
    declare_groups,
)
from twinstream.models.lowering.decoder_calls import KernelCalls
from twinstream.models.lowering.optimizer_tasks import gradient_attribute
from twinstream.models.lowering.parts.part_shapes import (
    PIECES,
    SQUARES,
    PartShapes,
    declare_contexts,
    declare_parts,
)
from twinstream.models.lowering.stage_cut import StageCut
from twinstream.models.lowering.stage_optimizer import StageOptimizer
from twinstream.models.lowering.task_blocks import TaskBlocks
from twinstream.models.providers.flops import model_flops_per_step
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Attribute, TaskOperand
from twinstream.schedule.workload import Workload


class PartOptimizer(StageOptimizer):
    """Each part is updated by itself, by the random numbers of its place among all parts.

    Norms are replicated: every rank has their whole gradient, and makes the same update; so are
    adapters that all parts read. Where each part has made some of it that is a sum. Squares of
    all parts of a group are one number of the norm, added up in the order of the parts.
    """

    shapes: PartShapes

    def add_up_own(self, group: str) -> None:
        """Add up what all of the rank's parts have made of the gradient of what they share."""
        shapes = self.shapes
        if shapes.is_summed(group) and shapes.spec.parts > 1:
            for total in shapes.sums(group):
                self._add_up_parts(group, total)

    def _add_up_parts(self, group: str, total: str) -> None:
        builder, label = self.builder, self._label("reduce_gradients", group)
        tensor = f"{GRADIENT_PIECES}.{total}"
        if not self.shapes.sums_in_order:
            said = CollectiveCall("all_reduce", ("tp",), "tp.norm")
            summed = builder.update("gradients", f"grad.{total}")
            builder.communicate(f"reduce.parts.{total}", said, [summed], label)
            return
        if self._cut.layout.tp > 1:
            operands = [builder.read("own", tensor), builder.write("all", f"all_{tensor}")]
            said = CollectiveCall("all_gather", ("tp",), "tp.norm")
            builder.communicate(f"gather.parts.{total}", said, operands, label)
            tensor = f"all_{tensor}"
        self._sum_pieces(group, self.shapes.spec.parts, tensor, total)

    def _sum_squares(self, group: str) -> None:
        super()._sum_squares(group)
        whole, number = whole_group(group), group.partition(PART)[2]
        if number == "0":  # the last, as in all of backward
            self._add_up_squares(whole)

    def _add_up_squares(self, whole: str) -> None:
        builder, parts = self.builder, self.shapes.spec.parts
        tensor, label = f"{SQUARES}.{whole}", self._label("gradient_squares", whole)
        if self._cut.layout.tp > 1:
            operands = [builder.read("own", tensor), builder.write("all", f"all_{tensor}")]
            said = CollectiveCall("all_gather", ("tp",), "tp.norm")
            builder.communicate(f"gather.part_squares.{whole}", said, operands, label)
            tensor = f"all_{tensor}"
        call = builder.call(
            f"sum_squares.{parts}", f"sum_squares/{self.recipe.implementations.vector}",
            {"num_values": parts}, gradient_norm_work(parts),
        )  # fmt: skip
        operands = [
            builder.read("values", tensor),
            builder.write("squares", f"grad_squares.{whole}{PART}"),
        ]
        builder.add(f"sum_part_squares.{whole}", call, operands, label)

    def _of_every_rule(self, group: str, part: OptimizerPart) -> dict[str, Attribute]:
        found = super()._of_every_rule(group, part)
        if PART not in group:
            return found
        spec, (whole, _, number) = self.shapes.spec, group.partition(PART)
        places = [rank * spec.parts_each + int(number) for rank in range(spec.tp)]
        seeds = [zlib.crc32(f"param.{whole}{PART}{place}".encode()) for place in places]
        return found | by_rank("tp", {"tensor_seed": seeds})


class PartSums(TaskBlocks):
    """Adds what parts of a stage exchange, and what follows from their sums."""

    shapes: PartShapes
    groups: PartOptimizer
    spec: PartedSpec
    shapes_kind = PartShapes
    groups_kind = PartOptimizer
    updates_a_layer = 2

    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> None:
        layout = cut.layout
        parted = PartedSpec.of(spec, layout.ep, tp=layout.tp, parts=layout.num_parts)
        super().__init__(parted, workload, recipe, cut)
        self.calls = KernelCalls(self.builder, self.spec.part, self.workload, recipe, layout)

    def model_flops(self) -> int:
        return model_flops_per_step(self.spec.whole, self.workload, self.recipe)

    def _declare(self) -> None:
        declare_groups(self.builder, self.shapes)
        declare_parts(self.builder, self.shapes)
        if self.workload.sliced:
            self._declare_contexts()

    def _declare_contexts(self) -> None:
        declare_contexts(self.builder, self.shapes)

    def _gradient_of(self, group: str, chunk: int, name: str = "gradients") -> list[TaskOperand]:
        """Where a chunk's contribution to a group's gradient is added to."""
        if group not in self.trained:
            return []
        tensor = self.shapes.sum_of(self.shapes.contributed_to(group), chunk)
        return [self.builder.accumulate(name, tensor)]

    def _after_group(self, group: str, round_: int) -> None:
        if self._completes and group in self.trained and group not in self.groups.shared:
            self.groups.add_up_own(group)
        super()._after_group(group, round_)

    # Hidden states of all tokens, where ranks have slices of them (`token_tasks`)

    def _prepared(self, chunks: range, prepare: Callable[[int], None]) -> Iterator[int]:
        """Chunks, each when what its tasks read is made."""
        for chunk in chunks:
            prepare(chunk)
            yield chunk

    def _gather_rows(self, what: str, layer: int | None, tensor: str, chunk: int) -> None:
        """Each rank has the hidden states of all tokens."""

    def _gather_hidden(self, what: str, layer: int, chunk: int) -> None:
        self._gather_rows(what, layer, self.shapes.hidden(layer, chunk), chunk)

    def _gather_gradient(self, what: str, layer: int | None, chunk: int) -> None:
        self._gather_rows(f"d_{what}", layer, f"d_hidden.{chunk}", chunk)

    def _d_hidden(self, chunk: int) -> TaskOperand:
        return self.builder.read("d_hidden", self.shapes.whole(f"d_hidden.{chunk}", chunk))

    def _head_norm_gradients(self, layer: int, number: int, chunk: int) -> list[TaskOperand]:
        """Where a part adds its gradients of norms that heads share: here behind its piece."""
        return []

    # Sums over parts

    def _piece(self, chunk: int, number: int) -> TaskOperand:
        """Where a part leaves its piece of a sum."""
        return self.builder.write("output", self.shapes.of_part(f"{PIECES}.{chunk}", number))

    def _exchange_pieces(self, what: str, chunk: int, layer: int | None) -> None:
        """Each rank gets the pieces of all parts, or their sum by the transport."""
        tensor = f"{PIECES}.{chunk}"
        if self.shapes.gathers_pieces:
            self._gathered(what, tensor, chunk, layer)
        elif self.cut.layout.tp > 1:
            pieces = [self.builder.update("pieces", tensor)]
            self._communicate(what, "all_reduce", pieces, chunk, layer)

    def _pieces(self, chunk: int) -> TaskOperand:
        name = f"all_{PIECES}.{chunk}" if self.shapes.gathers_pieces else f"{PIECES}.{chunk}"
        return self.builder.read("pieces", name)

    def _gathered(self, what: str, tensor: str, chunk: int, layer: int | None) -> str:
        """Gather what all ranks' parts have made; return where it is."""
        own = self.builder.read("own", tensor)
        operands = [own, self.builder.write("all", f"all_{tensor}")]
        self._communicate(what, "all_gather", operands, chunk, layer)
        return f"all_{tensor}"

    def _communicate(
        self, what: str, collective: str, operands: list[TaskOperand], chunk: int, layer: int | None
    ) -> None:
        said = CollectiveCall(collective, ("tp",), "tp")
        label = self.builder.label("tp", layer, chunk)
        self.builder.communicate(self._named(f"tp.{what}", chunk, layer), said, operands, label)

    def _add_up(
        self, kind: str, chunk: int, layer: int | None, residual: str | None, output: str
    ) -> None:
        """Add up the pieces of all parts, and what they are added to."""
        builder, num_pieces = self.builder, self.shapes.num_pieces
        rows, has_residual = self.shapes.rows, residual is not None
        cost = add_parts(self.calls.work(), rows, num_pieces, residual=has_residual)
        call = self.calls.other("add_parts", cost, self._of_pieces, ".residual" * has_residual)
        added = [] if residual is None else [builder.read("hidden", residual)]
        operands = [self._pieces(chunk), *added, builder.write("output", output)]
        self._task(kind, chunk, layer, call, operands)

    def _norm_backward(self, norm: str, chunk: int, layer: int | None, x: str) -> None:
        """Add up the pieces of a norm's gradient and take them through it."""
        builder, group = self.builder, HEAD if layer is None else str(layer)
        told: dict[str, Attribute] = {
            **self._of_pieces, "norm": norm, "norm_eps": self.spec.norm_eps,
            **gradient_attribute(self.recipe, self.spec.dtype),
        }  # fmt: skip
        if layer is not None and self.spec.qk_norm_rows:
            told[QK_NORM_WIDTHS] = tuple(qk_norm_widths(self.spec).values())
        elif layer is not None and self.spec.qk_norm:
            told["head_dim"] = self.spec.head_dim
        cost, suffix, routes = self._norm_cost, f".{norm}", list[TaskOperand]()
        if layer is not None and (experts := self.spec.part.layer(layer).experts) is not None:
            told |= self.calls.experts_attributes(experts)
            suffix += ".experts"
            if norm == "ffn_norm":
                cost += self.calls.work().of_experts.router_backward(
                    frozen=group not in self.trained
                )
                routes.append(builder.read("routes", f"routes.{layer}.{chunk}"))
        call = self.calls.other("norm_parts_backward", cost, told, suffix)
        make = builder.write if layer is None else builder.update
        operands = [
            self._pieces(chunk),
            builder.read("parameters", self.shapes.parameters(group)),
            builder.read("hidden", x),
            make("d_hidden", f"d_hidden.{chunk}"),
            *routes,
            *self._norm_gradient(group, chunk),
        ]
        self._task(f"{norm}_backward", chunk, layer, call, operands)

    def _norm_gradient(self, group: str, chunk: int) -> list[TaskOperand]:
        return self._gradient_of(group, chunk)

    @property
    def _norm_cost(self) -> tuple[Work, ...]:
        return norm_parts_backward(self.calls.work(), self.shapes.rows, self.shapes.num_pieces)

    @property
    def _of_pieces(self) -> dict[str, Attribute]:
        shapes = self.shapes
        return {"num_pieces": shapes.num_pieces, "piece_elements": shapes.pieces.num_elements}

    def _end_call(
        self, kernel: str, cost: tuple[Work, ...], number: int,
        told: dict[str, Attribute] | None = None,
    ) -> str:  # fmt: skip
        """Of a part of the vocabulary: a call of its own, since its rows begin elsewhere."""
        rows, each = self.spec.part.vocab_size, self.spec.parts_each
        first = [(rank * each + number) * rows for rank in range(self.spec.tp)]
        where = by_rank("tp", {"first_row": first})
        return self.calls.other(kernel, cost, {**(told or {}), **where}, f"{PART}{number}")

    def _named(self, kind: str, chunk: int, layer: int | None, number: int | None = None) -> str:
        place = f"{chunk}" if layer is None else f"{layer}.{chunk}"
        return f"r0.{kind}.{place}" + ("" if number is None else f"{PART}{number}")

    def _task(
        self, kind: str, chunk: int, layer: int | None, call: str,
        operands: Sequence[TaskOperand], number: int | None = None,
    ) -> str:  # fmt: skip
        name = self._named(kind, chunk, layer, number)
        self.builder.add(name, call, operands, self.builder.label(kind, layer, chunk, 0))
        return name
