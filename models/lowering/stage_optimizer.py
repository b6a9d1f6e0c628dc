"""The life of a stage's groups by our own kernels: sums over replicas, and the norm over stages."""

from twinstream.models.decoders.parted import SharedSpec
from twinstream.models.kernel_costs.scratch_sizes import sum_shares
from twinstream.models.kernel_costs.work import (
    add_gradients_work,
    gradient_norm_work,
    gradient_squares_work,
    sum_pieces_work,
)
from twinstream.models.layout import whole_group
from twinstream.models.lowering.chain_builder import ChainBuilder, CollectiveCall, UseMode
from twinstream.models.lowering.declarations import GRADIENT_PIECES, OptimizerPart
from twinstream.models.lowering.optimizer_tasks import OptimizerTasks
from twinstream.models.lowering.sharding import Sharding, shares_experts
from twinstream.models.lowering.stage_cut import StageCut, StageShapes
from twinstream.models.providers.trained import layout_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import CP
from twinstream.schedule.ops import Attribute, Label, TaskOperand


class StageOptimizer(OptimizerTasks):
    """Whoever owns a group sums its squares; the norm is taken by all stages over all groups.

    Each stage has zeros for groups of others, so that the sum over stages is what each owner has,
    and the norm is summed in the order of one device.

    With ZeRO each replica updates its shard of every group, and has the others' parameters
    gathered; with ZeRO 3 when the use before theirs begins: one use ahead. What is used twice in a
    row is gathered once.
    """

    shapes: StageShapes

    def __init__(
        self, builder: ChainBuilder, shapes: StageShapes, recipe: Recipe, step_state: TaskOperand,
        cut: StageCut,
    ) -> None:  # fmt: skip
        super().__init__(builder, shapes, recipe, step_state)
        self._cut = cut
        self.behind = 1 if cut.layout.dp * cut.layout.cp > 1 and cut.layout.dp_overlap else 0
        self.reduction = cut.reduction
        self._used: tuple[tuple[str, ...], int, int] | None = None
        self.zero = cut.layout.zero
        self.shared = tuple(filter(shapes.ends, reversed(shapes.trained)))

    def use(self, groups: tuple[str, ...], round_: int) -> None:
        """Gather parameters before a use of all groups that are read together."""
        groups = tuple(filter(self._cut.gathers, groups))
        if not groups:
            return
        tasks = self.builder.tasks
        number = len(tasks)
        used, place, used_in = self._used or ((), number, round_)
        for group in groups:
            if group not in used:
                whole = self.builder.write("parameters", f"gathered.{group}")
                operands = [self.builder.read("shard", f"param.{group}"), whole]
                label = self.builder.label("gather_parameters", self._layer(group), None, used_in)
                self._gather(f"{group}.v{whole.version}", group, operands, label)
        # They stand where the use before this one begins, and so run beside it.
        gathers, tasks[number:] = tasks[number:], []
        tasks[place:place] = gathers
        self._used = groups, len(tasks), round_

    def gradient(self, name: str, group: str, round_: int) -> TaskOperand:
        """The head's contributions to a shared embedding are added up by themselves."""
        return self.builder.accumulate(name, self.shapes.contributed_to(group))

    def after_group(self, group: str, round_: int) -> None:
        """Follow a group's last contribution of the step."""
        self.after_backward(group, "", last=True)

    def _axes(self, group: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if shares_experts(self._cut.layout, group):
            return (), ()
        return self._cut.replicas(group), ()

    def _complete(self, group: str) -> None:
        if shares_experts(self._cut.layout, group):
            self._sum_of_experts(group)
        super()._complete(group)

    def _sum_of_experts(self, group: str) -> None:
        """Add up what all replicas have made of the gradient of a rank's experts: in their order,
        each rank that has the same experts a share; in pairs, where sequences are in parts; or what
        these have, as the transport does it.
        """
        axes, pieces = self._cut.replicas(group), self.shapes.gradient_pieces(group)
        tensor = f"{GRADIENT_PIECES}.{group}"
        if pieces > 1 and self.reduction == "pairwise":
            self._sum_pairs(group, pieces, tensor)
        elif pieces > 1 and not axes:
            self._sum_pieces(group, pieces, tensor)
        elif pieces > 1:
            builder, shard = self.builder, f"grad_shard.{group}"
            operands = [builder.read("pieces", tensor), builder.write("shard", shard)]
            self._sum(f"reduce.{group}", group, "reduce_scatter", axes, operands)
            operands = [builder.read("shard", shard), self._gradient(group, "write")]
            said = CollectiveCall("all_gather", axes, "dp.gather")
            label = self._label("reduce_gradients", group)
            builder.communicate(f"gather.grad.{group}", said, operands, label)
        elif axes:
            self._sum(
                f"reduce.{group}", group, "all_reduce", axes, [self._gradient(group, "update")]
            )

    def _sum_pairs(self, group: str, pieces: int, tensor: str) -> None:
        """Ranks of cp are the innermost of replicas; then come those whose rows are here."""
        replicas = self._cut.replicas(group)
        if CP in replicas:
            operands = [self.builder.update("pieces", tensor)]
            self._sum(f"reduce.{CP}.{group}", group, "all_reduce", (CP,), operands)
        self._sum_pieces(group, pieces, tensor)
        if axes := tuple(axis for axis in replicas if axis != CP):
            gradient = self._gradient(group, "update")
            self._sum(f"reduce.{group}", group, "all_reduce", axes, [gradient])

    def _sum_pieces(self, group: str, pieces: int, tensor: str, total: str | None = None) -> None:
        """Add up pieces of a group's gradient to that, or to a `total` of some chunks."""
        total = total or group
        builder, dtype = self.builder, self.shapes.gradient_dtype
        count = self.shapes.num_elements(group)
        told: dict[str, Attribute] = {
            "dtype": dtype, "num_elements": count, "num_pieces": pieces,
            **({"pairwise": True} if self.reduction == "pairwise" else {}),
        }  # fmt: skip
        call = builder.call(
            f"sum_pieces.{count}", f"sum_pieces/{self.recipe.implementations.vector}", told,
            sum_pieces_work(count, pieces, dtype),
        )  # fmt: skip
        operands = [builder.read("pieces", tensor), builder.write("gradients", f"grad.{total}")]
        builder.add(f"sum_pieces.{total}", call, operands, self._label("reduce_gradients", group))

    def _summed(self, group: str) -> str:
        sharding = self._cut.sharding(group)
        return super()._summed(group) if sharding is None else sharding.gradient_kind

    def _follow(self, group: str) -> None:
        if self.recipe.clips and self._cut.squares(group):
            self._sum_squares(group)
        if self.recipe.optimizer == "device":
            self._update_group(group)

    def _sum_over_ends(self, group: str) -> None:
        """Each end sends what it has added up, and both add the same two."""
        builder, first, shapes = self.builder, self._cut.first, self.shapes
        shift = -1 if first else 1  # around the pipeline's ends
        both = list(zip(*map(shapes.sums, shapes.ends(group)), strict=True))
        num_contributions = shapes.num_chunks // len(both)
        for of_embedding, of_head in both:
            own, other = (of_embedding, of_head) if first else (of_head, of_embedding)
            builder.exchange("send", [builder.outgoing(own)], shift, 0)
            builder.exchange("recv", [builder.incoming(other, num_contributions)], shift, 0)
        for of_embedding, of_head in both:
            count, name = shapes.num_elements(group), f"add_gradients.{of_embedding}"
            self.add_gradients(name, of_embedding, of_head, count, shapes.gradient_dtype, None)

    def add_gradients(
        self, name: str, total: str, other: str, count: int, dtype: str, layer: int | None,
        *held: TaskOperand,
    ) -> None:  # fmt: skip
        """Add so many elements of a tensor to those of another."""
        builder = self.builder
        call = builder.call(
            f"add_gradients.{dtype}.{count}",
            f"add_gradients/{self.recipe.implementations.vector}",
            {"dtype": dtype, "num_elements": count}, add_gradients_work(count, dtype),
        )  # fmt: skip
        operands = [builder.update("sum", total), builder.read("gradients", other), *held]
        builder.add(name, call, operands, builder.label("add_gradients", layer))

    def _take_norm(self) -> None:
        builder = self.builder
        own = {self.shapes.norm_part(group) for group in self.shapes.trained}
        others = [part for part in self.shapes.norm_parts if part[0] not in own]
        for name, count in others:
            call = builder.call(
                f"no_squares.{count}", f"no_squares/{self.recipe.implementations.vector}", {},
                gradient_norm_work(count),
            )  # fmt: skip
            squares = builder.write("squares", f"grad_squares.{name}")
            builder.add(f"no_squares.{name}", call, [squares], builder.label("gradient_squares"))
        if others or self._cut.layout.pp > 1:  # one stage may have all that is trained
            said = CollectiveCall("all_reduce", ("pp",), "pp", reduction="rank_order")
            squares = builder.update("squares", "grad_squares")
            builder.communicate("reduce.squares", said, [squares], builder.label("gradient_norm"))
        super()._take_norm()

    def _place(self, group: str, part: OptimizerPart) -> dict[str, Attribute]:
        """With the ranges of the whole group, of which each rank's shard has its own."""
        sharding = self._cut.sharding(group)
        if sharding is None:
            return super()._place(group, part) | self._place_of_experts(group, part)
        whole = OptimizerPart(group, 0, self.shapes.num_elements(group))
        return super()._place(group, whole) | _shard_attributes(sharding)

    def _place_of_experts(self, group: str, part: OptimizerPart) -> dict[str, Attribute]:
        """Where a rank's share of a matrix of all experts begins in the whole group."""
        if not shares_experts(self._cut.layout, group):
            return {}
        model, recipe = self.shapes.spec, self.recipe
        assert isinstance(model, SharedSpec), "others share none"
        own = layout_of(model, recipe, group)
        whole = layout_of(model.part, recipe, whole_group(group))
        at = part.element_offset * model.itemsize
        (name,) = (inner.name for inner in own.tensors if inner.offset_bytes == at)
        first = whole.tensor(name).offset_bytes // model.itemsize
        return {"element_offset": first, "shard_axes": "ep"}

    def _gradient_shard(self, group: str, mode: UseMode) -> TaskOperand | None:
        if self.zero <= 1 or self._cut.sharding(group) is None:
            return None
        return self.builder.operand("shard", f"grad_shard.{group}", mode)

    def _sum_squares(self, group: str) -> None:
        """Of stretches of the shard; all of them gathered are added up as one device does it."""
        holders, parts = self.shapes.holders_of_squares(group), self.shapes.parts(group)
        if holders == 1:
            super()._sum_squares(group)
            return
        builder, vector = self.builder, self.recipe.implementations.vector
        label, count = self._label("gradient_squares", group), 0
        for part in parts:
            self._shard_squares(group, part, label)
            count += holders * sum_shares(part.num_elements)
        call = builder.call(
            f"sum_squares.{count}", f"sum_squares/{vector}", {"num_values": count},
            gradient_norm_work(count),
        )  # fmt: skip
        operands = [
            builder.read("values", f"all_squares.{group}"),
            builder.write("squares", self.shapes.squares_tensor(group)),
        ]
        builder.add(f"sum_squares.{group}", call, operands, label)

    def _shard_squares(self, group: str, part: OptimizerPart, label: Label) -> None:
        """Of the stretches of what this rank has of a part, and then of what all ranks have."""
        builder, dtype, sharding = (
            self.builder,
            self.shapes.gradient_dtype,
            self._cut.sharding(group),
        )
        count, name = part.num_elements, part.suffix
        attributes: dict[str, Attribute] = {"dtype": dtype, "num_elements": count}
        if sharding is not None and sharding.zero == 1:
            attributes |= {"element_offset": 0} | _shard_attributes(sharding)
        call = builder.call(
            f"shard_squares.{count}" + ("" if sharding is not None else ".own"),
            f"shard_squares/{self.recipe.implementations.vector}", attributes,
            gradient_squares_work(count, dtype),
        )  # fmt: skip
        squares = builder.write("squares", f"shard_squares.{name}")
        summed = builder.read("gradients", f"{self._summed(group)}.{name}")
        builder.add(f"shard_squares.{name}", call, [summed, squares], label)
        own = builder.read("own", f"shard_squares.{name}")
        gathered = builder.write("all", f"all_squares.{name}")
        axes = ("ep",) if sharding is None else sharding.axes
        said = CollectiveCall("all_gather", axes, "dp.gather")
        builder.communicate(f"gather.squares.{name}", said, [own, gathered], label)


def _shard_attributes(sharding: Sharding) -> dict[str, Attribute]:
    """The axes over which a shard's place follows from the rank's coordinates."""
    told: dict[str, Attribute] = {"shard_axes": " ".join(sharding.axes)}
    whole = sharding.whole_operands
    return told | ({"whole_operands": whole} if whole else {})
