"""Shapes, random inputs, an oracle in float64, and a call with all buffers full of NaN.

Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim.
"""

from dataclasses import dataclass

import torch

from tests.executor.kernels.driver import buffer
from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionInputs,
    AttentionResult,
    Starts,
)
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.attention.trial import mixed_lengths, starts_of
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import AttentionShape

# Largest difference over largest value. float32: rounding of sums over a few hundred keys. bf16:
# probabilities, score gradients and results are rounded to 2**-9 relative, score gradients are
# differences, and a result merged of two parts is rounded twice.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}


def shape(  # noqa: PLR0913
    num_sequences: int, num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int,
    head_dim: int, dtype: str = "float32",
) -> AttentionShape:  # fmt: skip
    sliced = num_keys > num_queries
    return AttentionShape(
        num_sequences, num_queries, num_keys, num_heads, num_kv_heads, head_dim, dtype, sliced
    )


def unequal(
    lengths: tuple[int, ...], num_heads: int, num_kv_heads: int, head_dim: int,
    dtype: str = "float32",
) -> AttentionShape:  # fmt: skip
    """Packed sequences, as many and none longer; their lengths are `mixed_lengths`."""
    tokens = sum(lengths)
    return AttentionShape(
        1, tokens, tokens, num_heads, num_kv_heads, head_dim, dtype, sliced=False,
        most_packed=len(lengths), longest_tokens=max(lengths),
    )  # fmt: skip


# Tiles of eager attention are 128 queries by 256 keys.
PACKED = [(2, 5, 5, 4, 2, 8), (3, 64, 64, 4, 4, 16), (1, 192, 192, 2, 1, 8), (2, 257, 257, 2, 1, 8)]
SLICED = [(1, 7, 19, 4, 2, 8), (1, 64, 192, 4, 1, 16), (1, 1, 13, 4, 2, 8), (1, 130, 700, 2, 2, 8)]

UNEQUAL = [
    ((5, 1, 7), 4, 2, 8),
    ((1, 1, 130, 64), 4, 4, 16),
    ((64, 193), 2, 1, 8),
    ((3, 300, 3, 3), 4, 1, 8),
    ((9, 2), 1, 1, 8),
]


def shape_of(sizes: tuple, dtype: str) -> AttentionShape:
    """Of an entry of PACKED, SLICED or UNEQUAL."""
    return (unequal if isinstance(sizes[0], tuple) else shape)(*sizes, dtype)


@dataclass(frozen=True)
class Data:
    """What a layer has; the first rows of slices of K and V are their context."""

    q: torch.Tensor  # [B, S, H, D]
    kv: torch.Tensor  # [B, C, 2, K, D]
    d_out: torch.Tensor  # [B, S, H, D]
    scale: float
    lengths: tuple[int, ...] = ()
    starts: Starts | None = None

    @property
    def inputs(self) -> AttentionInputs:
        k, v = self.kv[:, :, 0], self.kv[:, :, 1]
        return AttentionInputs(self.q, k, v, self.scale, self.starts)

    def each(self) -> "list[Data]":
        """The packed sequences of unequal lengths, each by itself."""
        parts = zip(
            *(x.split(self.lengths, dim=1) for x in (self.q, self.kv, self.d_out)), strict=True
        )
        return [Data(q, kv, d_out, self.scale) for q, kv, d_out in parts]


@dataclass(frozen=True)
class Found:
    out: torch.Tensor
    lse: torch.Tensor
    d_q: torch.Tensor
    d_kv: torch.Tensor
    scratch_bytes: tuple[int, int]


def random_data(of: AttentionShape, device: str = "cpu", seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, generator=generator)
        return made.to(device=device, dtype=getattr(torch, of.dtype))

    q = random(of.num_sequences, of.num_queries, of.num_heads, of.head_dim)
    kv = random(of.num_sequences, of.num_keys, 2, of.num_kv_heads, of.head_dim)
    lengths = mixed_lengths(of) if of.most_packed else ()
    d_out, scale = random(*q.shape), of.head_dim**-0.5
    return Data(2 * q, kv, d_out, scale, lengths, starts_of(of, q.device))


def call(name: str, of: AttentionShape, data: Data, d_kv_before: float = 1.0) -> Found:
    """Forward and backward with NaN in everything to be written, and exactly the scratch declared.

    Log-sum-exps lie as in a block's `attention` operand, gradients as in its scratch.
    """
    device, dtype = data.q.device, data.q.dtype
    implementation = attention_implementation(name)

    def nan(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(sizes, float("nan"), dtype=dtype, device=device)

    lse_HT = nan(of.num_heads, of.num_sequences * of.num_queries, dtype=torch.float32)
    lse = torch.unflatten(lse_HT, 1, (of.num_sequences, -1)).transpose(0, 1)
    result = AttentionResult(nan(*data.q.shape, dtype=dtype), lse)
    before = scratch(name, "forward", of, device)
    implementation.forward(data.inputs, result, before)

    width_q, width_kv = of.num_heads * of.head_dim, 2 * of.num_kv_heads * of.head_dim
    tokens = (of.num_sequences, of.num_queries)
    d_qkv = nan(*tokens, width_q + width_kv, dtype=dtype)
    d_q = torch.unflatten(d_qkv[:, :, :width_q], 2, (of.num_heads, of.head_dim))
    if of.sliced:
        d_kv = torch.full_like(data.kv, d_kv_before, dtype=torch.float32)
    else:
        d_kv = torch.unflatten(d_qkv[:, :, width_q:], 2, (2, of.num_kv_heads, of.head_dim))
    after = scratch(name, "backward", of, device)
    implementation.backward(
        data.inputs, result, AttentionGradients(data.d_out, d_q, d_kv, of.sliced), after
    )
    sizes = (before.high_water_bytes, after.high_water_bytes)
    return Found(result.out, result.lse, d_q, d_kv - d_kv_before * of.sliced, sizes)


def declared_bytes(name: str, of: AttentionShape) -> tuple[int, ...]:
    """Of scratch, forward and backward."""
    return tuple(attention_limits(name).scratch(p, of) for p in ("forward", "backward"))


def scratch(name: str, of_pass: str, of: AttentionShape, device: torch.device) -> Workspace:
    size_bytes = attention_limits(name).scratch(of_pass, of)
    return Workspace(buffer(size_bytes).to(device) if size_bytes else torch.empty(0).byte())


def oracle(data: Data) -> Found:
    """Bottom-right causal attention in float64, differentiated by autograd.

    Of unequal lengths, sequence by sequence.
    """
    if data.lengths:
        return side_by_side([oracle(one) for one in data.each()])
    q, kv = data.q.double().requires_grad_(), data.kv.double().requires_grad_()
    group = q.shape[2] // kv.shape[3]
    k, v = (kv[:, :, i].repeat_interleave(group, dim=2) for i in range(2))
    scores = torch.einsum("bshd,bchd->bhsc", q, k) * data.scale
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(~seen.tril(k.shape[1] - q.shape[1]), float("-inf"))
    out = torch.einsum("bhsc,bchd->bshd", scores.softmax(-1), v)
    out.backward(data.d_out.double())
    assert q.grad is not None and kv.grad is not None
    return Found(out.detach(), scores.logsumexp(-1).detach(), q.grad, kv.grad, (0, 0))


def side_by_side(found: list[Found]) -> Found:
    """Results of sequences as those of their pack."""
    return Found(
        out=torch.cat([one.out for one in found], dim=1),
        lse=torch.cat([one.lse for one in found], dim=2),
        d_q=torch.cat([one.d_q for one in found], dim=1),
        d_kv=torch.cat([one.d_kv for one in found], dim=1),
        scratch_bytes=(0, 0),
    )


def assert_close(found: Found, expected: Found, tolerance: float) -> None:
    for name in ("out", "d_q", "d_kv", "lse"):
        actual, wanted = getattr(found, name).double(), getattr(expected, name)
        error = (actual - wanted).abs().max() / wanted.abs().max()
        limit = max(1e-5, tolerance / 200) if name == "lse" else tolerance  # it is never rounded
        assert error <= limit, f"{name}: {error}"
