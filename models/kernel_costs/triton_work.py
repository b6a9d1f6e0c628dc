"""Cost descriptors where Triton's kernels do the vector operations: one pass, one launch each (but
for a router, whose operations are torch's).

Matmuls and attention are the eager implementation's. Every tensor counts once for each time that
a kernel reads or writes it in HBM; what a kernel reads again soon enough to find it in the L2
cache counts once. docs/record/kernels.md has the table. Legend as in `work`.
"""

from dataclasses import dataclass

from twinstream.models.kernel_costs.scratch_sizes import partial_sums
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.layout import dense_width
from twinstream.schedule.cost import Work

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class TritonChunkWork(ChunkWork):
    """The work of Triton's kernels for one chunk."""

    def block_forward(self) -> tuple[Work, ...]:
        t, s, covers = self.tokens, self.spec, self.adapters.covers
        return (
            self._norms_and_residual(),
            self.matmul(t, s.d_q, s.d_model, accumulate=covers("qkv")),
            self.matmul(t, 2 * s.d_kv, s.d_model, accumulate=covers("qkv")),
            self.vector("rope", 2 * t * (s.d_q + s.d_kv), launches=2),
            self.attention_forward(),
            self.matmul(t, s.d_model, s.d_q, accumulate=covers("o")),
            *(self.of_experts.choice() if s.experts else ()),
            *self.ffn_projections(),
            *(self.ffn_outputs() if self.ep == 1 else ()),
            *self.adapters.forward(),
        )

    def recompute_attention(self) -> tuple[Work, ...]:
        t, s, covers = self.tokens, self.spec, self.adapters.covers
        return (
            self._norms_and_residual(),
            self.matmul(t, s.d_q, s.d_model, accumulate=covers("qkv")),
            self.matmul(t, s.d_model, s.d_q, accumulate=covers("o")),
            *self.ffn_projections(),
            *self.adapters.recompute(),
        )

    def _before_down(self) -> tuple[Work, ...]:
        """Addmm copies the residual stream to its output and accumulates onto it."""
        return (self.vector("copy", 2 * self.tokens * self.spec.d_model),)

    def _ffn_backward(self, *, frozen: bool) -> tuple[Work, ...]:
        """SwiGLU reads gate, up and a gradient and writes two, and the product where weights'
        gradients need it."""
        t, s, covers = self.tokens, self.spec, self.adapters.covers
        normed = covers("gate_up") or s.experts is not None
        norm = self._norm_backward(frozen=frozen, normed=normed)
        if not (f := dense_width(s)):
            return (norm,)
        swiglu_tensors = 6 if covers("down") or not frozen else 5
        return (
            self.vector("swiglu", swiglu_tensors * t * f),
            self.matmul(t, f, s.d_model, accumulate=covers("down")),
            norm,
            self.matmul(t, s.d_model, 2 * f, accumulate=covers("gate_up")),
        )

    def block_backward(
        self, *, frozen: bool = False, frozen_experts: bool = False
    ) -> tuple[Work, ...]:
        t, s, covers = self.tokens, self.spec, self.adapters.covers
        d, q, k = s.d_model, s.d_q, s.d_kv
        works = [
            *self._experts_backward(frozen=frozen, frozen_experts=frozen_experts),
            *self._ffn_backward(frozen=frozen),
            self.matmul(t, q, d, accumulate=covers("o")),
            self._rope_backward(frozen=frozen),
            self.attention_backward(),
            self._norm_backward(frozen=frozen, normed=covers("qkv") or s.qk_norm),
            self.matmul(t, d, q + 2 * k, accumulate=covers("qkv")),
            *([] if frozen else self.dense_gradients()),
            *self.adapters.backward(),
        ]
        if s.qk_norm:
            works.append(self.matmul(t, k, d, accumulate=covers("qkv")))
        if s.qkv_bias and not frozen:
            works.append(self._summed("bias", t * (q + 2 * k), q + 2 * k, t, launches=2))
        if self.workload.sliced:
            elements = 2 * t * k
            moved = elements * (_FLOAT32_BYTES + s.itemsize)
            works.append(self._work("copy", (elements,), elements, moved))
        return tuple(works)

    def head_loss(self, row_slice: int) -> tuple[Work, ...]:
        """The row of logits is read for its sum, and again, from the L2 cache, for its gradient."""
        t, d, v = self.tokens, self.spec.d_model, self.spec.vocab_size
        slices = -(-t // row_slice)
        if self.recipe.freezes("head"):
            norm = self.vector("rms_norm", 5 * row_slice * d, launches=2)
        else:
            norm = self._summed("rms_norm", 5 * row_slice * d, d, row_slice, launches=3)
        return (
            *(self._times(work, slices) for work in (norm, *self.head_matmuls(row_slice))),
            self.vector("cross_entropy", 2 * t * v, launches=slices),
        )

    def head_evaluate(self, row_slice: int) -> tuple[Work, ...]:
        """The logits' gradients are written, as in training, and left unused."""
        norm, logits, _ = super().head_evaluate(row_slice)
        t, v = self.tokens, self.spec.vocab_size
        slices = -(-t // row_slice)
        return (norm, logits, self.vector("cross_entropy", 2 * t * v, launches=slices))

    def embed_backward(self) -> tuple[Work, ...]:
        """Tokens are copied, sorted and searched (a launch each), then their rows are added."""
        return (self.vector("embedding_backward", 3 * self.tokens * self.spec.d_model, launches=5),)

    def _norms_and_residual(self) -> Work:
        """Reads x, writes it normed; reads x and what is added, writes their sum and it normed."""
        return self.vector("rms_norm", 6 * self.tokens * self.spec.d_model, launches=2)

    def _norm_backward(self, *, frozen: bool, normed: bool) -> Work:
        """The norm again (2); x and both gradients read, one written (4); sums of the weight's.

        Of a `frozen` weight no sums, and the norm again only where `normed` rows are needed.
        """
        t, d = self.tokens, self.spec.d_model
        if frozen:
            return self.vector("rms_norm", (6 if normed else 4) * t * d, launches=1 + normed)
        return self._summed("rms_norm", 6 * t * d, d, t, launches=3)

    def _rope_backward(self, *, frozen: bool) -> Work:
        """Q rotated again; the gradients of Q and K turned back, through their norms if any."""
        t, s = self.tokens, self.spec
        if not s.qk_norm:
            return self.vector("rope", t * (4 * s.d_q + 2 * s.d_kv), launches=3)
        moved = t * (5 * s.d_q + 3 * s.d_kv)
        if frozen:
            return self.vector("rope", moved, launches=3)
        width = s.d_q + s.d_kv if s.qk_norm_rows else 2 * s.head_dim
        return self._summed("rope", moved, width, t, launches=5)

    def _summed(
        self, unit: str, elements: int, width: int, num_rows: int, *, launches: int
    ) -> Work:
        """A kernel that also leaves float32 shares of sums over rows, and the sum of the shares."""
        shares = 2 * partial_sums(num_rows) * width * _FLOAT32_BYTES
        moved = elements * self.spec.itemsize + shares
        return self._work(unit, (elements,), elements, moved, launches)
