"""The life of a stage's groups that are parts: their squares added up over all ranks' parts."""

import zlib

from twinstream.models.kernel_costs.work import gradient_norm_work
from twinstream.models.layout import PART, whole_group
from twinstream.models.lowering.chain_builder import CollectiveCall, by_rank
from twinstream.models.lowering.declarations import GRADIENT_PIECES, OptimizerPart
from twinstream.models.lowering.parts.part_shapes import SQUARES, PartShapes
from twinstream.models.lowering.stage_optimizer import StageOptimizer
from twinstream.schedule.ops import Attribute


class PartOptimizer(StageOptimizer):
    """Each part is updated by itself, by the random numbers of its place among all parts.

    Norms are replicated: every rank has their whole gradient, and makes the same update; so are
    adapters that all parts read. Where each part has made some of it that is a sum. Squares of
    all parts of a group are one number of the norm, added up in the order of the parts.
    """

    shapes: PartShapes

    def add_up_shared(self, group: str) -> None:
        """Add up what all parts have made of the gradient of what they share."""
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
