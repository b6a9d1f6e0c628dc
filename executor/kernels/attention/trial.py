"""One shape of attention on random data, its results written over NaN: to check and to time.

Buffers lie as in a block's operands, and scratch has exactly the size that is declared, so that
what is tried is what a run calls. Legend: B sequences, S queries and C keys of each, H query heads,
K key heads, D head_dim, T tokens.
"""

from dataclasses import dataclass
from itertools import cycle

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
    Starts,
)
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import AttentionPass, AttentionShape

# Scores this far below zero have shown padding that is scored 0: exp(0 - lse) overflows float32.
_LOW_SCORE = -120.0


@dataclass(frozen=True)
class Results:
    """What a forward and a backward have written."""

    out: torch.Tensor  # [B, S, H, D]
    lse: torch.Tensor  # [B, H, S]
    d_q: torch.Tensor  # [B, S, H, D]
    d_kv: torch.Tensor  # [B, C, 2, K, D]

    def by_name(self) -> dict[str, torch.Tensor]:
        return {"output": self.out, "log-sum-exp": self.lse, "dQ": self.d_q, "dK and dV": self.d_kv}

    def not_finite(self) -> tuple[str, ...]:
        """The names of those with a NaN or an infinity."""
        return tuple(name for name, x in self.by_name().items() if not bool(x.isfinite().all()))

    def same_bits(self, other: "Results") -> bool:
        mine, others = self.by_name().values(), other.by_name().values()
        return all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


class AttentionTrial:
    """Random operands of a shape, and an implementation that is called on them."""

    def __init__(
        self, implementation: AttentionImplementation, shape: AttentionShape, device: torch.device,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self._implementation, self._shape, self._device = implementation, shape, device
        self._generator = torch.Generator(device).manual_seed(seed)
        batch, heads, key_heads = shape.num_sequences, shape.num_heads, shape.num_kv_heads
        self.q = self._random(batch, shape.num_queries, heads, shape.head_dim)
        self.kv = self._random(batch, shape.num_keys, 2, key_heads, shape.head_dim)
        self.d_out = self._random(*self.q.shape)
        k, v = self.kv[:, :, 0], self.kv[:, :, 1]
        self._inputs = AttentionInputs(self.q, k, v, shape.head_dim**-0.5, starts_of(shape, device))
        lse_HT = torch.empty(heads, batch * shape.num_queries, device=device)
        lse = torch.unflatten(lse_HT, 1, (batch, -1)).transpose(0, 1)
        self._result = AttentionResult(torch.empty_like(self.q), lse)
        width_q = heads * shape.head_dim
        widths = (width_q, 2 * key_heads * shape.head_dim)
        d_qkv = torch.empty(
            batch, shape.num_queries, sum(widths), dtype=self.q.dtype, device=device
        )
        d_q = torch.unflatten(d_qkv[:, :, :width_q], 2, tuple(self.q.shape[2:]))
        if shape.sliced:
            d_kv = torch.empty(self.kv.shape, dtype=torch.float32, device=device)
        else:
            d_kv = torch.unflatten(d_qkv[:, :, width_q:], 2, tuple(self.kv.shape[2:]))
        self._gradients = AttentionGradients(self.d_out, d_q, d_kv, shape.sliced)
        self._scratch = {of_pass: self._workspace(of_pass) for of_pass in ("forward", "backward")}

    def lower_scores(self) -> None:
        """Give the first key head scores of about -120 all over; the softmax stays as it was."""
        group = self._shape.num_heads // self._shape.num_kv_heads
        self.q[:, :, :group, 0] = 1.0
        self.kv[:, :, 0, 0, 0] = _LOW_SCORE / self._inputs.scale

    def results(self) -> Results:
        """Forward and backward, over NaN; a copy."""
        written = (self._result.out, self._result.lse, self._gradients.d_q, self._gradients.d_kv)
        for x in written:
            x.fill_(float("nan"))
        if self._shape.sliced:  # its gradients of K and V are added
            self._gradients.d_kv.zero_()
        self.forward()
        self.backward()
        return Results(*(x.clone() for x in written))

    def forward(self) -> None:
        self._implementation.forward(self._inputs, self._result, self._scratch["forward"])

    def backward(self) -> None:
        self._implementation.backward(
            self._inputs, self._result, self._gradients, self._scratch["backward"]
        )

    def _random(self, *sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, generator=self._generator, device=self._device)
        return made.to(DTYPES[self._shape.dtype])

    def _workspace(self, of_pass: AttentionPass) -> Workspace:
        size_bytes = attention_limits(self._implementation.name).scratch(of_pass, self._shape)
        return Workspace(torch.empty(size_bytes, dtype=torch.uint8, device=self._device))


def mixed_lengths(shape: AttentionShape) -> tuple[int, ...]:
    """Return packed lengths that fill the shape: the longest, one token, and between."""
    lengths: list[int] = []
    left, wanted = shape.num_queries, cycle((shape.longest_tokens, 1, shape.longest_tokens // 2))
    while left:
        others = (shape.most_packed - len(lengths) - 1) * shape.longest_tokens
        lengths.append(min(left, max(next(wanted), left - others, 1)))
        left -= lengths[-1]
    return tuple(lengths)


def starts_of(shape: AttentionShape, device: torch.device) -> Starts | None:
    """Return the starts of packed sequences of mixed lengths; None where lengths are fixed."""
    if not shape.most_packed:
        return None
    cu_seqlens = Starts.cumulative(mixed_lengths(shape), shape.most_packed)
    return Starts(cu_seqlens.to(device), shape.longest_tokens)
