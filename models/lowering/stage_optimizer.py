"""Optimizer tasks of a stage: gradients summed over replicas first, and the norm over stages."""

from twinstream.models.kernel_costs.scratch_sizes import sum_shares
from twinstream.models.kernel_costs.work import (
    add_gradients_work,
    gradient_norm_work,
    gradient_squares_work,
)
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.communication_tasks import CommunicationTasks
from twinstream.models.lowering.declarations import OptimizerPart
from twinstream.models.lowering.optimizer_tasks import OptimizerTasks
from twinstream.models.lowering.stage_cut import StageCut, StageShapes
from twinstream.models.recipe import Recipe
from twinstream.schedule.ops import Attribute, Label, TaskOperand

_OF_HEAD = "head_grad.embedding"


class StageOptimizer(OptimizerTasks):
    """Whoever owns a group sums its squares; the norm is taken by all stages over all groups.

    Each stage has zeros for groups of others, so that the sum over stages is what each owner has,
    and the norm is summed in the order of one device.

    A gradient is summed over replicas once it is complete, and what follows that comes after the
    next group's backward, which so runs beside the sum.
    """

    def __init__(
        self, builder: ChainBuilder, shapes: StageShapes, recipe: Recipe, step_state: TaskOperand,
        cut: StageCut,
    ) -> None:  # fmt: skip
        super().__init__(builder, shapes, recipe, step_state)
        self._cut, self._replicas = cut, cut.replicas
        self._shares_gradient = shapes.shares_gradient
        if shapes.shares_gradient:
            sizes = {tensor.tensor_id: tensor.size_bytes for tensor in builder.tensors}
            size = sizes["grad.embedding"]
            builder.declare_flat(_OF_HEAD, size, "gradient", shapes.gradient_dtype)
        by_library = cut.replicas if cut.reduction == "library" else ()
        self.communications = CommunicationTasks(builder, by_library)
        self._summing: str | None = None

    def gradient(self, name: str, group: str, round_: int) -> TaskOperand:
        """The head's contributions to a shared embedding are added up by themselves."""
        if name == "embedding_gradients" and self._shares_gradient:
            return self.builder.accumulate(name, _OF_HEAD)
        return super().gradient(name, group, round_)

    def after_group(self, group: str, round_: int) -> None:
        """What follows a group's last contribution. A shared embedding waits for the other's."""
        if group != "embedding" or not self._shares_gradient:
            self._complete(group)

    def _complete(self, group: str) -> None:
        if self._replicas:
            self._sum_over_replicas(group)
        if self._replicas and self._cut.overlaps:
            self._follow_summed()
            self._summing = group
        else:
            self._follow(group)

    def _follow_summed(self) -> None:
        if self._summing is not None:
            self._follow(self._summing)
        self._summing = None

    def _follow(self, group: str) -> None:
        """What comes once a gradient is summed."""
        if self.recipe.clips and self._cut.squares(group):
            self._sum_squares(group)
        if self.recipe.optimizer == "device":
            self._update(group)

    def finish(self) -> None:
        """What follows all groups."""
        if self._shares_gradient:
            self._sum_over_ends()
            self._complete("embedding")
        self._follow_summed()
        if self.recipe.clips:
            self._sum_over_stages()
            self._take_norm()
        if self.recipe.optimizer != "device":
            for group in self._in_order():
                self._update(group)

    def _sum_over_replicas(self, group: str) -> None:
        operand = self.builder.update("gradients", f"grad.{group}")
        label = Label(kind="reduce_gradients", layer=self.shapes.spec.layer_of(group))
        self.communications.collective(
            f"reduce.{group}", "all_reduce", self._replicas, "dp", [operand], label
        )

    def _sum_over_ends(self) -> None:
        """Each end sends what it has added up, and both add the same two."""
        own, other = (
            ("grad.embedding", _OF_HEAD) if self._cut.first else (_OF_HEAD, "grad.embedding")
        )
        shift = -1 if self._cut.first else 1  # around the pipeline's ends
        num_contributions = self.shapes.workload.chunks_per_round
        self.communications.send(own, shift, 0)
        self.communications.receive(other, num_contributions, shift, 0)
        dtype = self.shapes.gradient_dtype
        num_elements = self.shapes.group_bytes("embedding") // self.shapes.spec.itemsize
        call = self.builder.call(
            "add_gradients", f"add_gradients/{self.recipe.implementations.vector}",
            {"dtype": dtype, "num_elements": num_elements}, add_gradients_work(num_elements, dtype),
        )  # fmt: skip
        operands = [
            self.builder.update("sum", "grad.embedding"),
            self.builder.read("gradients", _OF_HEAD),
        ]
        self.builder.add("add_gradients", call, operands, Label(kind="add_gradients"))

    def _sum_over_stages(self) -> None:
        others = [
            (name, n) for name, n in self.shapes.norm_parts if name not in self.shapes.trained
        ]
        for name, count in others:
            call = self.builder.call(
                f"no_squares.{count}", f"no_squares/{self.recipe.implementations.vector}", {},
                gradient_norm_work(count),
            )  # fmt: skip
            squares = self.builder.write("squares", f"grad_squares.{name}")
            self.builder.add(f"no_squares.{name}", call, [squares], Label(kind="gradient_squares"))
        if others:
            operand = self.builder.update("squares", "grad_squares")
            label = Label(kind="gradient_norm")
            self.communications.collective(
                "reduce.squares", "all_reduce", ("pp",), "pp", [operand], label
            )


class ShardedOptimizer(StageOptimizer):
    """Each replica updates its shard of every group, and has the others' parameters gathered.

    Calls name the axes over which a shard's place follows from the rank's coordinates.
    """

    def __init__(
        self, builder: ChainBuilder, shapes: StageShapes, recipe: Recipe, step_state: TaskOperand,
        cut: StageCut,
    ) -> None:  # fmt: skip
        super().__init__(builder, shapes, recipe, step_state, cut)
        assert cut.sharding is not None, "without shards nothing is cut"
        self.sharding = cut.sharding

    def _shard_elements(self, group: str) -> int:
        num_elements = self.shapes.group_bytes(group) // self.shapes.spec.itemsize
        return self.sharding.shard_elements(num_elements, self.recipe)

    @property
    def _shard_attributes(self) -> dict[str, Attribute]:
        told: dict[str, Attribute] = {"shard_axes": " ".join(self.sharding.axes)}
        whole = self.sharding.whole_operands
        return told | ({"whole_operands": whole} if whole else {})

    def _place(self, group: str, part: OptimizerPart) -> dict[str, Attribute]:
        """With the ranges of the whole group, of which each rank's shard has its own."""
        num_elements = self.shapes.group_bytes(group) // self.shapes.spec.itemsize
        whole = OptimizerPart(group, 0, num_elements)
        return super()._place(group, whole) | self._shard_attributes

    def _gradient(self, group: str) -> TaskOperand:
        return self.builder.read("gradients", f"{self.sharding.gradient_kind}.{group}")

    def _sum_over_replicas(self, group: str) -> None:
        if self.sharding.zero == 1:
            operands = [self.builder.update("gradients", f"grad.{group}")]
        else:
            operands = [
                self.builder.read("gradients", f"grad.{group}"),
                self.builder.write("shard", f"grad_shard.{group}"),
            ]
        label = Label(kind="reduce_gradients", layer=self.shapes.spec.layer_of(group))
        self.communications.collective(
            f"reduce.{group}", "reduce_scatter", self._replicas, "dp", operands, label
        )

    def _sum_squares(self, group: str) -> None:
        """Of stretches of the shard; all of them gathered are added up as one device does it."""
        shard, dtype = self._shard_elements(group), self.shapes.gradient_dtype
        vector = self.recipe.implementations.vector
        attributes: dict[str, Attribute] = {"dtype": dtype, "num_elements": shard}
        if self.sharding.zero == 1:
            attributes |= {"element_offset": 0} | self._shard_attributes
        label = Label(kind="gradient_squares", layer=self.shapes.spec.layer_of(group))
        call = self.builder.call(
            f"shard_squares.{shard}", f"shard_squares/{vector}", attributes,
            gradient_squares_work(shard, dtype),
        )  # fmt: skip
        squares = self.builder.write("squares", f"shard_squares.{group}")
        self.builder.add(f"shard_squares.{group}", call, [self._gradient(group), squares], label)
        own = squares.model_copy(update={"name": "own", "mode": "read"})
        gathered = self.builder.write("all", f"all_squares.{group}")
        self.communications.collective(
            f"gather.squares.{group}", "all_gather", self._replicas, "dp.gather", [own, gathered],
            label,
        )  # fmt: skip
        count = self.sharding.num_shards * sum_shares(shard)
        call = self.builder.call(
            f"sum_squares.{count}", f"sum_squares/{vector}", {"num_values": count},
            gradient_norm_work(count),
        )  # fmt: skip
        operands = [
            self.builder.read("values", f"all_squares.{group}"),
            self.builder.write("squares", f"grad_squares.{group}"),
        ]
        self.builder.add(f"sum_squares.{group}", call, operands, label)

    def _update(self, group: str) -> None:
        builder, recipe = self.builder, self.recipe
        operands = [
            builder.update("parameters", f"param.{group}"),
            self._gradient(group),
            builder.update("state", f"opt.{group}"),
            self._update_state,
        ]
        if recipe.clips:
            operands.append(builder.read("norm", "grad_norm"))
        label = Label(kind="optimizer_step", layer=self.shapes.spec.layer_of(group))
        part = OptimizerPart(group, 0, self._shard_elements(group))
        builder.add(f"optimizer.{group}", self._call(group, part), operands, label)
        if self.sharding.zero < 3:
            operand = builder.update("parameters", f"param.{group}")
            self.communications.collective(
                f"gather.{group}", "all_gather", self._replicas, "dp.gather", [operand],
                Label(kind="gather_parameters", layer=self.shapes.spec.layer_of(group)),
            )  # fmt: skip
