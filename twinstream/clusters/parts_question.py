"""What ranks train with tensor parallelism: every pipeline and number of replicas of such ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from twinstream.clusters.choosing import RanksQuestion
from twinstream.models.layouts.layout import Layout, LayoutError

_OF_PARTS = ("tp", "parts")


@dataclass(frozen=True)
class PartsQuestion(RanksQuestion):
    """The question of ranks, with `tp` and `parts` among what is fixed; they are not searched."""

    def _layouts(self) -> Iterator[Layout]:
        """Those of the ranks that tensor parallelism leaves, each with it.

        Raises:
            LayoutError: what is fixed is no layout of so many ranks.
        """
        tp, parts = self.fixed.get("tp") or 1, self.fixed.get("parts")
        if tp == 1 and parts is None:
            yield from super()._layouts()
            return
        ranks, left = divmod(self.num_ranks, tp)
        if left:
            raise LayoutError(f"tp {tp} does not divide {self.num_ranks} ranks")
        fixed = {name: value for name, value in self.fixed.items() if name not in _OF_PARTS}
        changes = {"tp": tp, "parts": parts, "sequence_parallel": tp == 1}
        try:
            for layout in replace(self, num_ranks=ranks, fixed=fixed)._layouts():
                yield layout.model_copy(update=changes)
        except LayoutError as error:
            raise LayoutError(f"of {self.num_ranks} ranks with tp {tp}: {error}") from None
