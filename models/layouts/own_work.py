"""What one rank computes for one microbatch by twinstream's own kernels, of layouts that they run.

A block is one task, and the head another. Works and bytes are those of the task chain
(`models.lowering`), so that a bound of a layout speaks of the kernels that it is planned with.
"""

from collections import Counter
from dataclasses import dataclass, field

from twinstream.models.kernel_costs.triton_work import TritonChunkWork
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.layout import EXPERTS
from twinstream.models.layouts.saved import Recompute
from twinstream.models.layouts.work import PartWork, ShapeWork
from twinstream.models.providers.flops import SavedLevel, saved_bytes_per_token
from twinstream.models.providers.trained import trained_groups
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work
from twinstream.schedule.workload import Workload

_LEVELS = {
    "full": SavedLevel.INPUT,
    "attention": SavedLevel.ATTENTION,
    "experts": SavedLevel.EXPERTS,
}


@dataclass(frozen=True, kw_only=True)
class OwnWork(ShapeWork):
    """Work of twinstream's kernels; nothing is split over tp, cp or ep.

    >>> from twinstream.models.presets import load_preset
    >>> work = OwnWork(shape=load_preset("8b"), seq_len=8192)
    >>> sum(one.flops for one in work.block().forward if one.unit == "matmul") == (
    ...     2 * 8192 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336))
    True
    """

    recipe: Recipe = field(default_factory=Recipe)

    def block(self) -> PartWork:
        """All of one block."""
        chunk = self._chunk
        trained = trained_groups(self.shape, self.recipe)
        frozen = {"frozen": "0" not in trained, "frozen_experts": f"0{EXPERTS}" not in trained}
        weight = chunk.weight_gradients(**frozen)
        left = Counter(weight)
        backward: list[Work] = []
        for one in chunk.block_backward(**frozen):
            if left[one]:
                left[one] -= 1
            else:
                backward.append(one)
        forward = (*chunk.block_forward(), *self._anew("block_forward"))
        return PartWork(forward, (*backward, *self._anew("block_backward")), weight)

    def recomputes(self) -> dict[Recompute, tuple[Work, ...]]:
        """What backward repeats of a block by level, that of the block's input last."""
        chunk = self._chunk
        anew = self._anew("block_recompute_input")
        experts: dict[Recompute, tuple[Work, ...]] = {}
        if self.shape.experts is not None:
            again = self._anew("block_recompute_experts")
            experts = {"experts": (*chunk.recompute_experts(), *again)}
        return {
            **experts,
            "attention": (*chunk.recompute_attention(), *anew),
            "full": (*chunk.recompute_input(), *anew),
        }

    def _anew(self, kernel: str) -> tuple[Work, ...]:
        """What makes matrices of a base in few bits anew."""
        base, experts = (self.recipe.base_of(group) for group in ("0", f"0{EXPERTS}"))
        return self._chunk.dequantized(kernel, base, experts)

    def block_saved_bytes(self, recompute: Recompute) -> int:
        """Of the block's input, K and V, and of all that no recompute has to make again."""
        level = _LEVELS.get(recompute, SavedLevel.FULL)
        return self.tokens * saved_bytes_per_token(self.shape, level)

    def head(self) -> PartWork:
        """Final norm, logits in row slices, their loss and gradients, in one task."""
        return PartWork(self._chunk.head_loss(self.recipe.row_slice(self.tokens)))

    def embedding(self) -> PartWork:
        """Rows of all tokens, and their gradients where they are trained."""
        trains = "embedding" in trained_groups(self.shape, self.recipe)
        backward = self._chunk.embed_backward() if trains else ()
        return PartWork(self._chunk.embed_forward(), (), backward)

    @property
    def _chunk(self) -> ChunkWork:
        workload = Workload(
            seq_len=self.seq_len, chunk_tokens=self.tokens, chunks_per_round=1, rounds_per_step=1
        )
        is_triton = self.recipe.implementations.vector == "triton"
        kind = TritonChunkWork if is_triton else ChunkWork
        return kind(self.shape, workload, 0, self.recipe)
