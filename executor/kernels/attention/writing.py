"""Around libraries that write into tensors they are given, and align bottom-right themselves.

They take packed sequences of unequal lengths in one call, without the dimension of the batch:
Q [T, H, D], K and V [T, K, D], log-sum-exps [H, T], T the tokens of all.

Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.attention.packing import Starts
from twinstream.executor.kernels.workspace import Workspace


@dataclass(frozen=True)
class Gradients:
    """Where a library writes; all in the dtype of the inputs, rows may be strided."""

    d_q: torch.Tensor  # [B, S, H, D]
    d_k: torch.Tensor  # [B, C, K, D]
    d_v: torch.Tensor  # [B, C, K, D]


@dataclass(frozen=True)
class WritingForward:
    """With `starts`, lengths are unequal, and the tensors without the dimension of the batch."""

    inputs: AttentionInputs
    result: AttentionResult
    starts: Starts | None


@dataclass(frozen=True)
class WritingBackward:
    """As a forward."""

    inputs: AttentionInputs
    result: AttentionResult
    d_out: torch.Tensor  # [B, S, H, D]
    gradients: Gradients
    starts: Starts | None


class WritingLibrary(Protocol):
    """Causal attention, bottom-right."""

    def forward(self, call: WritingForward, workspace: Workspace) -> None:
        """Write the result; its log-sum-exp may be strided."""

    def backward(self, call: WritingBackward) -> None:
        """Write the gradients; the log-sum-exp is dense."""


@dataclass(frozen=True)
class Writing:
    """Forward and backward by the protocol of attention implementations."""

    library: WritingLibrary

    def forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        with workspace.frame():
            self.library.forward(_forward_call(inputs, result, workspace), workspace)

    def backward(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None:
        with workspace.frame():
            dense = AttentionResult(result.out, dense_lse(result.lse, workspace))
            d_kv = gradients.d_kv
            if gradients.accumulate:
                d_kv = workspace.take(tuple(d_kv.shape), inputs.k.dtype)
            into = Gradients(gradients.d_q, d_kv[:, :, 0], d_kv[:, :, 1])
            call = _forward_call(inputs, dense, workspace)
            if call.starts is not None:
                into, d_out_BSHD = Gradients(into.d_q[0], into.d_k[0], into.d_v[0]), d_out_BSHD[0]
            self.library.backward(
                WritingBackward(call.inputs, call.result, d_out_BSHD, into, call.starts)
            )
            if gradients.accumulate:
                gradients.d_kv.add_(d_kv)


def _forward_call(
    inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
) -> WritingForward:
    if not inputs.lengths:
        return WritingForward(inputs, result, None)
    starts = Starts.of(inputs.lengths, inputs.q.device, workspace)
    flat = AttentionInputs(inputs.q[0], inputs.k[0], inputs.v[0], inputs.scale)
    return WritingForward(flat, AttentionResult(result.out[0], result.lse[0]), starts)


def cumulative_lengths(starts: Starts | None) -> dict[str, torch.Tensor | int]:
    """The arguments that FlashAttention-3 and 4 take for unequal lengths, by their names."""
    if starts is None:
        return {}
    return {
        "cu_seqlens_q": starts.tensor, "cu_seqlens_k": starts.tensor,
        "max_seqlen_q": starts.longest, "max_seqlen_k": starts.longest,
    }  # fmt: skip


def dense_lse(lse_BHS: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """The log-sum-exp as libraries want it; a copy only for packed sequences."""
    if lse_BHS.shape[0] == 1 and lse_BHS.is_contiguous():
        return lse_BHS
    return workspace.take(tuple(lse_BHS.shape), torch.float32).copy_(lse_BHS)
