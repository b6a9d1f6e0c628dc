"""What one rank computes for one microbatch, part by part: FLOPs and HBM bytes, never seconds.

Communication is not counted here. Elementwise operations are counted as fused as Megatron-LM fuses
them: a norm, an activation and bias + dropout + residual are one pass each.

Legend: T tokens that matrix products see, t tokens of norms and residuals, d model width, q, k and
f the rank's widths of Q, K (= V) and FFN, V the rank's rows of the vocabulary.
"""

from dataclasses import replace
from typing import NamedTuple

from twinstream.models.kernel_costs.work import adamw_work
from twinstream.models.layouts.attention_core import CoreWork, core_steps
from twinstream.models.layouts.kernels import Kernels
from twinstream.models.layouts.rank_sizes import RankSizes
from twinstream.models.options import LatentAttention
from twinstream.schedule.cost import Work

_FLOAT32_BYTES = 4
_MASK_BYTES = 1


class PartWork(NamedTuple):
    """Kernels of a part in their order; of backward those of the input's gradient, which the part
    before waits for, and those of the weights', which nothing does."""

    forward: tuple[Work, ...] = ()
    backward_input: tuple[Work, ...] = ()
    backward_weight: tuple[Work, ...] = ()

    @property
    def backward(self) -> tuple[Work, ...]:
        """Of input and weights."""
        return self.backward_input + self.backward_weight


def joined(*parts: PartWork) -> PartWork:
    """Parts one after the other; backward begins with the last."""
    back = parts[::-1]
    return PartWork(
        tuple(work for part in parts for work in part.forward),
        tuple(work for part in back for work in part.backward_input),
        tuple(work for part in back for work in part.backward_weight),
    )


class ShapeWork(RankSizes):
    """Work of one rank for one microbatch, of one layer or of a part outside the layers.

    >>> from twinstream.models.presets import load_preset
    >>> from twinstream.models.decoders.spec import ModelSpec
    >>> work = ShapeWork(shape=load_preset("8b"), seq_len=8192, tp=8)
    >>> [one.shape for one in work.mlp().forward if one.unit == "matmul"]
    [(8192, 3584, 4096), (8192, 4096, 1792)]
    """

    def attention(self) -> PartWork:
        """Norm, QKV, RoPE, core, output projection, dropout and residual; behind `latents`."""
        before, after = self.attention_before_core(), self.attention_after_core()
        core = self.core_attention()
        return joined(before, PartWork(core.forward, core.backward), after)

    def latents(self) -> PartWork:
        """Norm and projections to few columns of the rank's own tokens, of latent attention."""
        latent = self.shape.latent
        if latent is None:
            return PartWork()
        t, d = self.local_tokens, self.shape.d_model
        norm = PartWork((self._norm(),), (self._norm_backward(),))
        queries = self._linear(t, latent.q_rank, d) if latent.q_rank else PartWork()
        return joined(norm, queries, self._linear(t, latent.kv_rank + latent.rope_dim, d))

    def attention_before_core(self) -> PartWork:
        """Norm, QKV and RoPE."""
        if self.shape.latent is not None:
            return self._latent_before_core(self.shape.latent)
        T, d, q, k = self.tokens, self.shape.d_model, self.d_q, self.d_kv
        heads, heads_back = self._head_passes()
        bias = [self._bias(T, q + 2 * k)] if self.shape.biases or self.shape.qkv_bias else []
        return PartWork(
            (
                self._norm(),
                *self._kernels.casts(T * d),
                self._kernels.linear(T, q + 2 * k, d),
                *heads,
            ),
            (
                *heads_back,
                *self._kernels.casts(T * (q + 2 * k)),
                self._kernels.linear(T, d, q + 2 * k),
                self._norm_backward(),
            ),
            (self._kernels.weight_gradient(q + 2 * k, d, T), *bias),
        )

    def _latent_before_core(self, latent: LatentAttention) -> PartWork:
        """Norms of few columns, projections of those to the rank's heads, RoPE, and keys and values
        put together."""
        T, t, rope = self.tokens, self.local_tokens, latent.rope_dim
        made = self.heads * (self.shape.head_dim - rope + latent.v_dim)
        width = latent.q_rank or self.shape.d_model
        queries = joined(self._norm_of(t, latent.q_rank), self._linear(T, self.d_q, width))
        keys = joined(self._norm_of(t, latent.kv_rank), self._linear(T, made, latent.kv_rank))
        moved = 2 * T * self.heads * rope + T * (made + rope + self.d_kv + self.d_v)
        rotated = PartWork(
            (self._vector("rope", moved, launches=2),),
            (self._vector("rope_backward", moved, launches=2),),
        )
        return joined(queries, keys, rotated)

    def _norm_of(self, rows: int, width: int) -> PartWork:
        """A norm of so many columns, if any, with nothing beside it."""
        if not width:
            return PartWork()
        return PartWork(
            (self._vector("rms_norm", 2 * rows * width),),
            (self._vector("rms_norm_backward", 3 * rows * width, launches=2),),
        )

    def _linear(self, m: int, n: int, k: int) -> PartWork:
        """A linear layer [m, k] x [k, n] by itself."""
        kernels = self._kernels
        return PartWork(
            (*kernels.casts(m * k), kernels.linear(m, n, k)),
            (*kernels.casts(m * n), kernels.linear(m, k, n)),
            (kernels.weight_gradient(n, k, m),),
        )

    def core_attention(self, num_steps: int | None = None) -> CoreWork:
        """All of the core, or so many of its `cp` equal steps."""
        return core_steps(self, self._kernels, self.cp if num_steps is None else num_steps)

    def core_attention_steps(self) -> tuple[CoreWork, ...]:
        """The core as `cp` equal steps of a ring; together they are `core_attention()`."""
        return (self.core_attention(num_steps=1),) * self.cp

    def core_attention_again(self) -> tuple[Work, ...]:
        """What selective recompute repeats in backward."""
        return self.core_attention().forward

    def attention_after_core(self) -> PartWork:
        """Output projection, dropout and residual."""
        T, d, q, kernels = self.tokens, self.shape.d_model, self.d_o, self._kernels
        projection = PartWork(
            (*kernels.casts(T * q), kernels.linear(T, d, q)),
            (*kernels.casts(T * d), kernels.linear(T, q, d)),
            (kernels.weight_gradient(d, q, T),),
        )
        return joined(projection, self._residual())

    def mlp(self) -> PartWork:
        """Norm, dense FFN, dropout and residual; nothing of a shape with experts."""
        if self.shape.experts is not None:
            return PartWork()
        norm = PartWork((self._norm(),), (self._norm_backward(),))
        return joined(norm, self._ffn(self.tokens, self.d_ff), self._residual())

    def mlp_again(self) -> tuple[Work, ...]:
        """What recompute of the FFN repeats in backward: norm, products into it, activation."""
        forward = self.mlp().forward
        into = [n for n, work in enumerate(forward) if work.unit in ("swiglu", "gelu")]
        return forward[: into[0] + 1] if into else ()

    def router(self) -> PartWork:
        """Norm, router and the sorting of tokens by expert; nothing of a dense shape."""
        if self.shape.experts is None:
            return PartWork()
        t, d, n = self.local_tokens, self.shape.d_model, self.shape.experts.count
        moved = (t + self.routed_tokens) * d
        scores = self._vector("router", 4 * t * n, launches=4)  # softmax, top-k, counts, positions
        permute = self._vector("permute", moved)
        return PartWork(
            (self._norm(), self._kernels.matmul(t, n, d), scores, permute),
            (permute, scores, self._kernels.matmul(t, d, n), self._norm_backward()),
            (self._kernels.weight_gradient(n, d, t, self.dtype),),
        )

    def experts(self) -> PartWork:
        """The rank's experts on the tokens that come to them, the shared one, and their sum.

        Tokens are sorted by expert on arrival where the rank has several, and back after. Products
        in fp8 gain nothing for their weights' gradients, which take as long as in the model's
        dtype: so the steps of grok1 in fp8 have it, on which that was chosen (docs/benchmarks/
        clusters.md); quantising expert by expert is as likely a cause.
        """
        experts = self.shape.experts
        if experts is None:
            return PartWork()
        d, rows = self.shape.d_model, self.expert_tokens
        sort = (self._vector("permute", 2 * rows * d),) if self.num_experts > 1 else ()
        sorting = PartWork(sort, sort)
        combine = self._vector("permute", (self.local_tokens + self.routed_tokens) * d)
        routed = joined(
            sorting, self._ffn(rows, self.expert_d_ff, self.num_experts, self.dtype), sorting
        )
        shared = PartWork()
        if experts.shared_d_ff:
            added = self._vector("residual", 3 * self.local_tokens * d)
            shared = joined(self._ffn(self.tokens, self.shared_d_ff), PartWork((added,), (added,)))
        return joined(routed, PartWork((combine,), (combine,)), shared, self._residual())

    def layer(self) -> PartWork:
        """All parts of one layer."""
        return joined(self.latents(), self.attention(), self.mlp(), self.router(), self.experts())

    def embedding(self) -> PartWork:
        """Rows of all tokens from a part of the vocabulary; learned positions and dropout."""
        t, d = self.local_tokens, self.shape.d_model
        rows = self._vector("embedding", 2 * self.tokens * d)
        grads = self._vector("embedding_backward", 4 * self.tokens * d)
        positions = [self._vector("residual", 3 * t * d)] if self.shape.max_positions else []
        summed = [self._vector("embedding_backward", t * d)] if self.shape.max_positions else []
        masks = [self._dropout()] if self.shape.dropout else []
        return PartWork((rows, *positions, *masks), tuple(masks), (grads, *summed))

    def head(self) -> PartWork:
        """Final norm, logits of a part of the vocabulary, and their cross entropy in float32.

        Forward turns logits to float32 and passes over them twice, for their maximum and for
        exponentials; backward makes their gradient of those and turns it back.
        """
        T, d, V = self.tokens, self.shape.d_model, self.vocab
        logits, dtype = T * V, self.dtype_of("head")
        kernels = replace(self._kernels, linear_dtype=dtype, weight_dtype=dtype)
        widened = logits * _FLOAT32_BYTES
        loss = self._vector("cross_entropy", logits, extra_bytes=4 * widened, launches=3)
        d_loss = self._vector("cross_entropy", logits, extra_bytes=3 * widened, launches=2)
        return PartWork(
            (self._norm(), *kernels.casts(T * d), kernels.linear(T, V, d), loss),
            (d_loss, *kernels.casts(logits), kernels.linear(T, d, V), self._norm_backward()),
            (kernels.weight_gradient(V, d, T),),
        )

    def optimizer(self, num_elements: int) -> tuple[Work, ...]:
        """AdamW on so many parameters."""
        return adamw_work(num_elements, self.dtype, self.gradient_dtype, self.optimizer_state)

    def gradient_norm(self, num_elements: int) -> tuple[Work, ...]:
        """Reads so many gradients once, for the sum of their squares."""
        return (self._gradient_kernels.vector("gradient_squares", num_elements),)

    def _ffn(self, rows: int, f: int, groups: int = 1, weight_dtype: str | None = None) -> PartWork:
        """Up (and gate), activation and down; of so many FFNs that share the rows equally."""
        shape, each = self.shape, -(-rows // groups)
        d = shape.d_model
        up = (2 if shape.gated else 1) * f
        unit = "swiglu" if shape.gated else "gelu"
        kernels = self._kernels
        bias = [self._bias(rows, up)] if shape.biases else []
        into = PartWork(
            (
                *kernels.casts(rows * d),
                kernels.linear(each, up, d, groups),
                self._vector(unit, rows * (up + f)),
            ),
            (
                self._vector(f"{unit}_backward", rows * (2 * up + f)),
                *kernels.casts(rows * up),
                kernels.linear(each, d, up, groups),
            ),
            (kernels.weight_gradient(up, d, each, weight_dtype, groups), *bias),
        )
        out = PartWork(
            (*kernels.casts(rows * f), kernels.linear(each, d, f, groups)),
            (*kernels.casts(rows * d), kernels.linear(each, f, d, groups)),
            (kernels.weight_gradient(d, f, each, weight_dtype, groups),),
        )
        return joined(into, out)

    def _residual(self) -> PartWork:
        """Bias, dropout and the sum with the residual stream; its bias' gradient."""
        t, d = self.local_tokens, self.shape.d_model
        masks = t * d * _MASK_BYTES if self.shape.dropout else 0
        forward = self._vector("residual", 3 * t * d, extra_bytes=masks)
        return PartWork(
            (forward,),
            (self._dropout(),) if self.shape.dropout else (),
            (self._bias(t, d),) if self.shape.biases else (),
        )

    def _head_passes(self) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
        """Norms of heads and RoPE, forward and, in its order, backward."""
        width = self.tokens * (self.d_q + self.d_kv)
        forward, backward = [], []
        if self.shape.qk_norm:
            forward.append(self._vector("rms_norm", 2 * width, launches=2))
            backward.append(self._vector("rms_norm_backward", 3 * width, launches=2))
        if self.shape.positions == "rope":
            forward.append(self._vector("rope", 2 * width))
            backward.insert(0, self._vector("rope_backward", 2 * width))
        return tuple(forward), tuple(backward)

    def _norm(self) -> Work:
        return self._vector(f"{self.shape.norm}_norm", 2 * self.local_tokens * self.shape.d_model)

    def _norm_backward(self) -> Work:
        """Reads input and gradient, writes a gradient; adds it to the residual stream's."""
        elements = 6 * self.local_tokens * self.shape.d_model
        return self._vector(f"{self.shape.norm}_norm_backward", elements, launches=2)

    def _dropout(self) -> Work:
        elements = self.local_tokens * self.shape.d_model
        return self._vector("dropout", 2 * elements, extra_bytes=elements * _MASK_BYTES)

    def _bias(self, rows: int, width: int) -> Work:
        """The gradient of a bias is a sum over rows."""
        return self._vector("bias", rows * width)

    def _vector(self, unit: str, elements: int, *, extra_bytes: int = 0, launches: int = 1) -> Work:
        return self._kernels.vector(unit, elements, extra_bytes=extra_bytes, launches=launches)

    @property
    def _kernels(self) -> Kernels:
        products, weights = self.dtype_of("products"), self.dtype_of("gradients")
        return Kernels(self.dtype, products, self.gradient_dtype, weights)

    @property
    def _gradient_kernels(self) -> Kernels:
        return replace(self._kernels, dtype=self.gradient_dtype)
