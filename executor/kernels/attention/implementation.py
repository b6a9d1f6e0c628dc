"""What every attention implementation is called with, and what it says of itself.

Causal attention of equally long sequences, aligned bottom-right: with fewer queries than keys,
the queries are the last positions. Legend: B sequences, S queries and C keys of each, H query
heads, K key heads (query heads h with h // (H / K) = k share key head k), D head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from twinstream.executor.kernels.workspace import Workspace


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys and values, and the factor on the scores; views may be strided."""

    q: torch.Tensor  # [B, S, H, D]
    k: torch.Tensor  # [B, C, K, D]
    v: torch.Tensor  # [B, C, K, D]
    scale: float


@dataclass(frozen=True)
class AttentionResult:
    """The output and, in float32, the log-sum-exp of each row of scaled scores."""

    out: torch.Tensor  # [B, S, H, D]
    lse: torch.Tensor  # [B, H, S]


@dataclass(frozen=True)
class AttentionGradients:
    """Where the backward leaves its results.

    d_q is overwritten. d_kv holds the gradient of K, then V; it is overwritten, or, with
    `accumulate`, it is float32 and added to.
    """

    d_q: torch.Tensor  # [B, S, H, D]
    d_kv: torch.Tensor  # [B, C, 2, K, D]
    accumulate: bool


class AttentionForward(Protocol):
    """Writes the result."""

    def __call__(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None: ...


class AttentionBackward(Protocol):
    """Writes the gradients of the inputs, given that of the output."""

    def __call__(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None: ...


@dataclass(frozen=True)
class AttentionImplementation:
    """One way to compute attention.

    `deterministic` means the same bits from run to run, as it is called here. `missing` says what
    of the library is not installed and how to install it, or None; it imports nothing. What it
    computes is in `twinstream.models.attention_limits`.
    """

    name: str
    deterministic: bool
    missing: Callable[[], str | None]
    forward: AttentionForward
    backward: AttentionBackward


def nothing_missing() -> str | None:
    """The implementation needs nothing but torch."""
    return None
