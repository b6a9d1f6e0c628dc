"""Around torch's attention operators, which have heads before tokens, [B, H, S, D].

Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from twinstream.executor.kernels.attention.implementation import AttentionInputs, AttentionResult
from twinstream.executor.kernels.workspace import Workspace

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """What a backward reads of its forward."""

    q: torch.Tensor  # [B, H, S, D]
    k: torch.Tensor  # [B, K, C, D]
    v: torch.Tensor  # [B, K, C, D]
    out: torch.Tensor  # [B, H, S, D]
    lse: torch.Tensor  # [B, H, S]


class SdpaForward(Protocol):
    """The output [B, H, S, D] and the log-sum-exp [B, H, S]."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class SdpaBackward(Protocol):
    """The gradients of Q [B, H, S, D], and of K and V [B, K, C, D]."""

    def __call__(
        self, d_out: torch.Tensor, saved: Saved, workspace: Workspace, *, scale: float, causal: bool
    ) -> Tensors3: ...


@dataclass(frozen=True)
class Sdpa:
    """A pair of operators as a library that returns its results."""

    forward_operator: SdpaForward
    backward_operator: SdpaBackward

    def forward(
        self, inputs: AttentionInputs, workspace: Workspace, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = _swapped(inputs.q, inputs.k, inputs.v)
        out, lse = self.forward_operator(q, k, v, scale=inputs.scale, causal=causal)
        return out.transpose(1, 2), lse

    def backward(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        workspace: Workspace,
        *,
        causal: bool,
    ) -> Tensors3:
        q, k, v, out, d_out = _swapped(inputs.q, inputs.k, inputs.v, result.out, d_out_BSHD)
        saved = Saved(q, k, v, out, result.lse)
        d_q, d_k, d_v = self.backward_operator(
            d_out, saved, workspace, scale=inputs.scale, causal=causal
        )
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2)


def unused_seed(workspace: Workspace) -> torch.Tensor:
    """What operators take as the state of dropout, and do not look at without any."""
    return workspace.take((2,), torch.int64)


def _swapped(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)
