"""The operands of a block kernel as tensors.

`projections` holds Q as projected (with its bias, before q_norm and RoPE), x_o (hidden plus the
output of attention) and gate_up (gate columns, then up) of the network that all tokens go through.
A part of a block has those of its own heads in one operand, gate_up in another, and x_o by itself.
`expert_projections` holds gate_up of every row that goes to an expert, in the order of experts, and
`routes` where rows go; where ranks share experts, `rows` and `row_weights` hold what is sent to
them and what comes back, in that order, too. `kv` holds K after k_norm and RoPE, and V. `sequences`
holds where packed sequences start, and each token's position in its own. Legend: T tokens of the
chunk, C tokens seen (context and chunk), D d_model, H query heads, K key heads, Q = H * head_dim, E
head_dim, F FFN width, S rows that go to experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionInputs,
    AttentionResult,
    Starts,
)
from twinstream.executor.kernels.base_codes import levels
from twinstream.executor.kernels.block.adapters import Adapters
from twinstream.executor.kernels.block.block_call import BlockCall
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.experts.routing import (
    BalanceLoss,
    Routes,
    balance_sums,
    routes_of,
)
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.vector.gradients import weight_views
from twinstream.executor.kernels.vector.rope import Rope
from twinstream.executor.kernels.vector.vector_ops import HeadNorm, RmsNorm, VectorOps
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attributes import Attributes
from twinstream.models.layout import shared_layout
from twinstream.models.options import Experts
from twinstream.models.recipes.quantized_base import BLOCK_ELEMENTS, CODE_BITS, SCALES


@dataclass(frozen=True)
class BlockOperands:
    """Views made on demand: a kernel asks only for those of operands that it has.

    What it does with them are its `calls`.
    """

    call: BlockCall
    calls: Calls
    weights: Mapping[str, torch.Tensor]
    operands: Operands
    vector: VectorOps
    workspace: Workspace
    rope: Rope
    starts: Starts | None
    adapters: Adapters
    room: torch.Tensor | None  # [elements] of the largest matrix of a base in few bits
    levels: torch.Tensor | None  # of its codes
    rstd: torch.Tensor | None  # [2, T] of a part, whose norms are not saved

    @classmethod
    def of(
        cls, operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
    ) -> "BlockOperands":
        call = BlockCall.from_attributes(attributes)
        weights: dict[str, torch.Tensor] = {}
        if "parameters" in operands:  # a part may have experts alone
            weights |= weight_views(operands["parameters"], call.layout, call.dtype)
        if call.experts_layout is not None and "experts" in operands:
            weights |= weight_views(operands["experts"], call.experts_layout, call.dtype)
        workspace, positions, starts = Workspace(operands["scratch"].bytes), None, None
        rstd = None
        if call.in_parts:
            weights |= weight_views(operands["shared"], shared_layout(call.spec), call.dtype)
            rstd = workspace.take((2, call.num_tokens), torch.float32)
        if call.most_packed:
            sequences = operands["sequences"].bytes.view(torch.int32)
            num_starts = call.most_packed + 1
            starts = Starts(sequences[:num_starts], call.seq_len, operands["sequences"].pack)
            positions = sequences[num_starts:]
        spec = call.spec
        rope = Rope(
            spec.rope_theta, spec.head_dim, call.seq_len, call.chunk_start, positions,
            spec.rope_scaling,
        )  # fmt: skip
        adapters = Adapters.of(operands, call, calls, workspace)
        room, table = None, levels(call.few_bits, workspace.device)
        if call.few_bits != "model":
            layouts = [call.layout] if call.base != "model" else []
            if call.experts_layout and call.experts_base != "model":
                layouts.append(call.experts_layout)
            largest = max(prod(i.shape) for each in layouts for i in each.tensors)
            room = workspace.take((largest,), call.dtype)
        return cls(
            call, calls, weights, operands, vector, workspace, rope, starts, adapters, room, table,
            rstd,
        )  # fmt: skip

    def matrix(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        """[rows, in] of a projection; of a base in few bits made anew by a call that comes before
        those that multiply with it, in a room that the next one takes. Of experts [E, out, in]."""
        layout, operand, base = self.call.layout, "parameters", self.call.base
        if name.startswith("experts") and self.call.experts_layout is not None:
            layout, operand = self.call.experts_layout, "experts"
            base = self.call.experts_base
        if self.room is None or base == "model":
            return self.weights[name][rows]
        flat = self.operands[operand]
        inner, block = layout.tensor(name), BLOCK_ELEMENTS[base]
        all_scales = layout.tensor(f"{name}{SCALES}")
        height, width = inner.shape[0], prod(inner.shape[1:])
        start, stop, _ = rows.indices(height)
        codes = flat.view(torch.uint8, (inner.size_bytes,), inner.offset_bytes)
        scales = flat.view(torch.float32, all_scales.shape, all_scales.offset_bytes)
        ends = [row * width * CODE_BITS[base] // 8 for row in (start, stop)]
        made = self.room[: (stop - start) * width].view(stop - start, *inner.shape[1:])
        self.calls.add(
            self.vector.write_dequantized, codes[slice(*ends)],
            scales[start * width // block : stop * width // block], made, self.levels,
        )  # fmt: skip
        return made

    def tokens_by_width(self, operand: str) -> torch.Tensor:
        """A [T, D] operand: hidden, output, d_hidden."""
        shape = (self.call.num_tokens, self.call.spec.d_model)
        return self.operands[operand].view(self.call.dtype, shape)

    def take(self, width: int) -> torch.Tensor:
        """A [T, width] temporary."""
        return self.workspace.take((self.call.num_tokens, width), self.call.dtype)

    @property
    def norms(self) -> torch.Tensor:
        """[2, T]: rstd of attention_norm and of ffn_norm."""
        if self.rstd is not None:
            return self.rstd
        return self.operands["norms"].view(torch.float32, (2, self.call.num_tokens))

    def norm(self, name: str) -> RmsNorm:
        """attention_norm of the block's input, or ffn_norm of x_o."""
        if name == "attention_norm":
            x_TD, rstd_T = self.tokens_by_width("hidden"), self.norms[0]
        else:
            x_TD, rstd_T = self.x_o, self.norms[1]
        return RmsNorm(x_TD, rstd_T, self.weights[name])

    def head_norm(self, name: str) -> HeadNorm | None:
        """q_norm or k_norm, if the model has them."""
        if not self.call.spec.qk_norm:
            return None
        return HeadNorm(self.weights[name], self.call.spec.norm_eps)

    @property
    def kv(self) -> torch.Tensor:
        """[T, 2, K, E]: K and V of the chunk."""
        spec = self.call.spec
        shape = (self.call.num_tokens, 2, spec.num_kv_heads, spec.head_dim)
        return self.operands["kv"].view(self.call.dtype, shape)

    @property
    def seen_kv(self) -> torch.Tensor:
        """[C, 2, K, E]: K and V of the context, and right behind it those of the chunk; where the
        chunk has none by itself, all of them are the context's."""
        if "kv" not in self.operands:
            spec = self.call.spec
            all_seen = (self.call.num_seen, 2, spec.num_kv_heads, spec.head_dim)
            return self.operands["context"].view(self.call.dtype, all_seen)
        kv = self.kv
        if self.call.chunk_start == 0:
            return kv
        shape = (self.call.chunk_start, *kv.shape[1:])
        context = self.operands["context"].view(self.call.dtype, shape)
        storages = (context.untyped_storage().data_ptr(), kv.untyped_storage().data_ptr())
        behind = context.storage_offset() + context.numel()
        assert storages[0] == storages[1] and kv.storage_offset() == behind, (
            "the context must end where the chunk's own K and V begin"
        )
        seen = (self.call.chunk_start + self.call.num_tokens, *kv.shape[1:])
        return torch.as_strided(context, seen, context.stride())

    def attention_inputs(self, rotated_q_TQ: torch.Tensor) -> AttentionInputs:
        seen_BC2KE = torch.unflatten(self.seen_kv, 0, (self.call.num_sequences, -1))
        return AttentionInputs(
            q=self.by_sequence(rotated_q_TQ),
            k=seen_BC2KE[:, :, 0],
            v=seen_BC2KE[:, :, 1],
            scale=float(self.call.spec.head_dim) ** -0.5,
            starts=self.starts,
            causal=self.call.causal,
        )

    @property
    def attention_result(self) -> AttentionResult:
        heads = (self.call.spec.num_heads, self.call.num_tokens)
        offset_bytes = self.attention_out.numel() * self.call.dtype.itemsize
        lse_HT = self.operands["attention"].view(torch.float32, heads, offset_bytes)
        return AttentionResult(
            out=self.by_sequence(self.attention_out),
            lse=torch.unflatten(lse_HT, 1, (self.call.num_sequences, -1)).transpose(0, 1),
        )

    @property
    def attention_out(self) -> torch.Tensor:
        """[T, Q]: the output of attention."""
        shape = (self.call.num_tokens, self.call.spec.d_q)
        return self.operands["attention"].view(self.call.dtype, shape)

    @property
    def q(self) -> torch.Tensor:
        """[T, Q]."""
        return self._projection(0, self.call.spec.d_q)

    @property
    def x_o(self) -> torch.Tensor:
        """[T, D]."""
        if self.call.in_parts:
            return self.tokens_by_width("x_o")
        return self._projection(self.call.spec.d_q, self.call.spec.d_model)

    @property
    def gate_up(self) -> torch.Tensor:
        """[T, 2 F]: of the network that all tokens go through."""
        spec = self.call.spec
        before = 0 if self.call.in_parts else spec.d_q + spec.d_model
        return self._projection(before, 2 * self.call.dense_width)

    @property
    def expert_gate_up(self) -> torch.Tensor:
        """[S, 2 F]: of routed experts."""
        experts = self.experts
        shape = (self.call.num_tokens * experts.per_token, 2 * experts.d_ff)
        return self.operands["expert_projections"].view(self.call.dtype, shape)

    @property
    def sent_rows(self) -> torch.Tensor:
        """[S, D]: rows that go to experts on other ranks, or that come back."""
        shape = (self.call.num_tokens * self.experts.per_token, self.call.spec.d_model)
        return self.operands["rows"].view(self.call.dtype, shape)

    @property
    def sent_weights(self) -> torch.Tensor:
        """[S], float32: what each row's output counts, or the gradient of that."""
        count = self.call.num_tokens * self.experts.per_token
        return self.operands["row_weights"].view(torch.float32, (count,))

    @property
    def experts(self) -> Experts:
        """How tokens go to experts, of a block that has some."""
        assert self.call.spec.experts is not None
        return self.call.spec.experts

    @property
    def routes(self) -> Routes:
        shape = (self.call.num_tokens, self.experts.per_token)
        return routes_of(self.operands["routes"], shape)

    @property
    def router_bias(self) -> torch.Tensor | None:
        """[experts], float32; None where a router has none."""
        if not self.experts.correction_bias:
            return None
        return self.operands["router_bias"].view(torch.float32, (self.experts.count,))

    @property
    def balance(self) -> BalanceLoss | None:
        """The sums of the round's load-balancing loss; None where there is no such loss."""
        if not self.experts.aux_loss:
            return None
        labels = self.operands["tokens"].view(torch.int32, (2, self.call.num_tokens))[1]
        return balance_sums(self.operands["balance"], self.experts, labels)

    def _projection(self, columns_before: int, width: int) -> torch.Tensor:
        tokens, dtype = self.call.num_tokens, self.call.dtype
        offset_bytes = tokens * columns_before * dtype.itemsize
        return self.operands["projections"].view(dtype, (tokens, width), offset_bytes)

    @property
    def qkv_columns(self) -> dict[str, slice]:
        """Columns of Q, K and V in qkv_proj's output."""
        d_q, d_kv = self.call.spec.d_q, self.call.spec.d_kv
        return {
            "q": slice(0, d_q),
            "k": slice(d_q, d_q + d_kv),
            "v": slice(d_q + d_kv, d_q + 2 * d_kv),
        }

    def q_and_kv(self, d_qkv_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of Q, [T, Q], and those of K and V, [T, 2, K, E]."""
        spec = self.call.spec
        kv = torch.unflatten(d_qkv_TN[:, spec.d_q :], 1, (2, spec.num_kv_heads, spec.head_dim))
        return d_qkv_TN[:, : spec.d_q], kv

    def gate_and_up(self, both_T2F: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns of gate and of up."""
        d_ff = self.call.dense_width
        return {"gate": both_T2F[:, :d_ff], "up": both_T2F[:, d_ff:]}

    def by_head(self, x_TQ: torch.Tensor) -> torch.Tensor:
        """[T, Q] as [T, H, E], or the columns of K as [T, K, E]."""
        return torch.unflatten(x_TQ, 1, (-1, self.call.spec.head_dim))

    def by_sequence(self, x_TQ: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(self.by_head(x_TQ), 0, (self.call.num_sequences, -1))
