"""What every attention implementation is called with, and what it says of itself.

Causal attention of equally long sequences, aligned bottom-right: with fewer queries than keys,
the queries are the last positions. Packed sequences of unequal lengths lie one behind the other in
a batch of one. Legend: B sequences, S queries and C keys of each, H query
heads, K key heads (query heads h with h // (H / K) = k share key head k), D head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.demand.attention_limits import attention_limits


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys and values, and the factor on the scores; views may be strided.

    `lengths`, where it is not empty, is of packed sequences whose tokens do not see one another:
    B is 1, and S = C their sum.
    """

    q: torch.Tensor  # [B, S, H, D]
    k: torch.Tensor  # [B, C, K, D]
    v: torch.Tensor  # [B, C, K, D]
    scale: float
    lengths: tuple[int, ...] = ()


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


class AttentionCalls(Protocol):
    """Both passes."""

    @property
    def forward(self) -> AttentionForward: ...

    @property
    def backward(self) -> AttentionBackward: ...


def nothing_missing() -> str | None:
    """The implementation needs nothing but torch."""
    return None


@dataclass(frozen=True)
class AttentionImplementation:
    """One way to compute attention.

    `missing` says what of the library is not installed and how to install it, or None; it imports
    nothing. What it computes, and whether it gives the same bits from run to run, is in
    `twinstream.models.demand.attention_limits`.
    """

    name: str
    missing: Callable[[], str | None]
    forward: AttentionForward
    backward: AttentionBackward

    @classmethod
    def of(
        cls, name: str, calls: AttentionCalls,
        missing: Callable[[], str | None] = nothing_missing,
    ) -> "AttentionImplementation":  # fmt: skip
        return cls(name, missing, calls.forward, calls.backward)

    @property
    def deterministic(self) -> bool:
        return attention_limits(self.name).deterministic
