"""Around libraries that write into tensors they are given, and align bottom-right themselves.

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
from twinstream.executor.kernels.workspace import Workspace


@dataclass(frozen=True)
class Gradients:
    """Where a library writes; all in the dtype of the inputs, rows may be strided."""

    d_q: torch.Tensor  # [B, S, H, D]
    d_k: torch.Tensor  # [B, C, K, D]
    d_v: torch.Tensor  # [B, C, K, D]


class WritingLibrary(Protocol):
    """Causal attention, bottom-right."""

    def forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        """Write the result; its log-sum-exp may be strided."""

    def backward(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        gradients: Gradients,
    ) -> None:
        """Write the gradients; the log-sum-exp is dense."""


@dataclass(frozen=True)
class Writing:
    """Forward and backward by the protocol of attention implementations."""

    library: WritingLibrary

    def forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        with workspace.frame():
            self.library.forward(inputs, result, workspace)

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
            self.library.backward(inputs, dense, d_out_BSHD, into)
            if gradients.accumulate:
                gradients.d_kv.add_(d_kv)


def dense_lse(lse_BHS: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """The log-sum-exp as libraries want it; a copy only for packed sequences."""
    if lse_BHS.shape[0] == 1:
        return lse_BHS
    return workspace.take(tuple(lse_BHS.shape), torch.float32).copy_(lse_BHS)
