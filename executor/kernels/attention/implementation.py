"""What every attention implementation is called with, and what it says of itself.

Causal attention of equally long sequences, aligned bottom-right: with fewer queries than keys,
the queries are the last positions. Legend: B sequences, S queries and C keys of each, H query
heads, K key heads (query heads h with h // (H / K) = k share key head k), D head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.attention_shape import AttentionShape


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
class Limits:
    """What an implementation computes: None is no limit of its own.

    `capabilities` are major compute capabilities of CUDA devices.
    """

    device: Literal["cpu", "cuda"] | None = None
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    most_head_dim: int | None = None
    head_dim_multiple: int = 1
    capabilities: tuple[int, ...] = ()

    def refusal(self, shape: AttentionShape) -> str | None:
        """Why a shape cannot be computed, or None."""
        if shape.dtype not in self.dtypes:
            return f"it computes {' and '.join(self.dtypes)}, not {shape.dtype}"
        if self.most_head_dim is not None and shape.head_dim > self.most_head_dim:
            return f"head_dim {shape.head_dim} is over its limit of {self.most_head_dim}"
        if shape.head_dim % self.head_dim_multiple:
            return f"head_dim {shape.head_dim} is no multiple of {self.head_dim_multiple}"
        return None


@dataclass(frozen=True)
class AttentionImplementation:
    """One way to compute attention.

    `deterministic` means the same bits from run to run, as it is called here. `missing` says what
    of the library is not installed and how to install it, or None; it imports nothing.
    """

    name: str
    deterministic: bool
    limits: Limits
    missing: Callable[[], str | None]
    forward: AttentionForward
    backward: AttentionBackward


def nothing_missing() -> str | None:
    """The implementation needs nothing but torch."""
    return None
