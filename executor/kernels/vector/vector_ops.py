"""One interface for all that kernels compute beside matmuls and attention.

Blocks, head, embedding and optimizer are composed once, of torch's matmuls, an attention
implementation and the operations here; "eager" and "triton" are two ways to do these. Math is
float32, rounded once where a result is stored. Legend: T tokens, D width, H heads, E head_dim.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from twinstream.executor.kernels.vector.rope import Rope
from twinstream.executor.kernels.vector.updates import AdamwConstants, FlatUpdate
from twinstream.executor.kernels.workspace import Workspace
from twinstream.schedule.ops import Mode


@dataclass(frozen=True)
class RmsNorm:
    """The inputs of one normalisation."""

    x: torch.Tensor  # [T, D]
    rstd: torch.Tensor  # [T]
    weight: torch.Tensor  # [D]


@dataclass(frozen=True)
class HeadNorm:
    """The RMSNorm that all heads of Q, or all of K, share."""

    weight: torch.Tensor  # [E]
    eps: float


@dataclass(frozen=True)
class VectorGradient:
    """Where the gradient of a vector of weights goes: `write` it there, or `update` it."""

    tensor: torch.Tensor  # [D]
    mode: Mode


@dataclass(frozen=True)
class NormGradients:
    """`d_x` is overwritten, or with `accumulate` added to; d_out and d_x may be one tensor.

    A frozen weight has no gradient.
    """

    d_out: torch.Tensor  # [T, D]
    d_x: torch.Tensor  # [T, D]
    d_weight: VectorGradient | None
    accumulate: bool


@dataclass(frozen=True)
class HeadNormBackward:
    """The norm of each head that came before RoPE, its input, and its weight's gradient.

    A frozen weight has none.
    """

    norm: HeadNorm
    x: torch.Tensor  # [T, H, E]
    d_weight: VectorGradient | None


@dataclass(frozen=True)
class LogitRows:
    """Logits, which become their gradients, and the loss of each row; labels < 0 do not count."""

    logits: torch.Tensor  # [T, V]
    labels: torch.Tensor  # [T], int32
    losses: torch.Tensor  # [T], float32
    loss_scale: torch.Tensor  # [1], or [T] of each row, float32


@dataclass(frozen=True)
class SortedTokens:
    """Tokens in the order of their ids; `last` is where the run of a sorted token's id ends."""

    ids: torch.Tensor  # [T], int64
    order: torch.Tensor  # [T], int64
    last: torch.Tensor  # [T], int64


class VectorOps(Protocol):
    """One implementation. Temporaries come from the workspace that an operation is given.

    `product_with_backward`: swiglu_backward makes the product too, in the same pass, and is given
    room for it; otherwise it is made before.
    """

    product_with_backward: bool

    def write_normed(
        self,
        norm: RmsNorm,
        out_TD: torch.Tensor,
        *,
        eps: float | None = None,
        residual_TD: torch.Tensor | None = None,
    ) -> None:
        """out = norm(x); with `residual` x becomes x + residual first.

        With `eps` the norm's rstd is computed and written, otherwise it is there already.
        """
        ...

    def rms_norm_backward(
        self, norm: RmsNorm, gradients: NormGradients, workspace: Workspace
    ) -> None:
        """The gradients of x and of the weight from that of norm(x)."""
        ...

    def write_rotated(
        self, x_THE: torch.Tensor, norm: HeadNorm | None, rope: Rope, out_THE: torch.Tensor
    ) -> None:
        """out = RoPE(norm(x)); out may be x."""
        ...

    def rotated_backward(
        self, d_THE: torch.Tensor, rope: Rope, norm: HeadNormBackward | None, workspace: Workspace
    ) -> None:
        """Turn the gradient of RoPE(norm(x)) into that of x, in place."""
        ...

    def write_swiglu(self, gate_up_T2F: torch.Tensor, out_TF: torch.Tensor) -> None:
        """out = silu(gate) * up; the columns of gate_up are gate, then up."""
        ...

    def swiglu_backward(
        self, gate_up_T2F: torch.Tensor, d_T2F: torch.Tensor, product_TF: torch.Tensor | None
    ) -> None:
        """Turn the product's gradient, the right half of d, into those of gate and up.

        With `product` also write silu(gate) * up there.
        """
        ...

    def add_column_sums(
        self, x_TD: torch.Tensor, gradient: VectorGradient, workspace: Workspace
    ) -> None:
        """The gradient of a bias from that of what it was added to."""
        ...

    def cross_entropy(self, rows: LogitRows, workspace: Workspace) -> None:
        """Scaled losses and, in place, the gradients of the logits."""
        ...

    def add_token_gradients(
        self,
        d_hidden_TD: torch.Tensor,
        tokens: SortedTokens,
        gradient_VD: torch.Tensor,
        workspace: Workspace,
    ) -> None:
        """Add the rows of d_hidden to the rows of their ids, each row's sum rounded once."""
        ...

    def write_dequantized(
        self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor,
        levels: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write a matrix of a frozen base from its codes and scales; 8bit has no `levels`."""
        ...

    def grouped_matmul(
        self, x_SI: torch.Tensor, matrices_EIO: torch.Tensor, ends_E: torch.Tensor,
        out_SO: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False,
    ) -> None:  # fmt: skip
        """out = scale x M by the matrix of each row's expert; or added to what is there."""
        ...

    def add_grouped_gradient(
        self, gradient_EOI: torch.Tensor, d_SO: torch.Tensor, x_SI: torch.Tensor,
        ends_E: torch.Tensor, mode: Mode,
    ) -> None:  # fmt: skip
        """gradient (+)= d^T x of each expert's rows; exact zeros of one without any."""
        ...

    def add_rows(
        self, x_SO: torch.Tensor, weights_TK: torch.Tensor | None, places_S: torch.Tensor,
        residual_TO: torch.Tensor | None, out_TO: torch.Tensor,
    ) -> None:  # fmt: skip
        """out = residual + a token's rows, weighted, in the order of its experts; rounded once."""
        ...

    def weigh_rows(
        self, d_SI: torch.Tensor, product_SI: torch.Tensor, weights_TK: torch.Tensor,
        places_S: torch.Tensor, d_weights_TK: torch.Tensor,
    ) -> None:  # fmt: skip
        """The gradients of weights from a product and its gradient, both not weighted yet; then
        weigh both.

        What an expert makes of a product is linear in it, so that the gradient of an output's
        weight is the product times its gradient before the weight.
        """
        ...

    def sum_squares(self, x_N: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
        """out, [1] float32, is the sum of squares, in an order that follows from N alone."""
        ...

    def square_shares(self, x_N: torch.Tensor, shares: torch.Tensor) -> None:
        """shares, float32, are the sums of squares of stretches that `sum_squares` adds up."""
        ...

    def sum_values(self, x_N: torch.Tensor, out: torch.Tensor) -> None:
        """out, [1], is the sum of float32 values, in such an order."""
        ...

    def root_of_sum(self, x_N: torch.Tensor, out: torch.Tensor) -> None:
        """out, [1], is the square root of the sum of float32 values, in such an order."""
        ...

    def adamw(self, flat: FlatUpdate, constants: AdamwConstants) -> None:
        """Update parameter, m and v, and the master if there is one."""
        ...
