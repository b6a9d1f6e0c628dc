"""The vector operations as Triton kernels."""

import torch

from twinstream.executor.kernels.query_key import HeadNorm
from twinstream.executor.kernels.rms_norm import RmsNorm
from twinstream.executor.kernels.rope import Rope
from twinstream.executor.kernels.triton_kernels.adamw import adamw
from twinstream.executor.kernels.triton_kernels.column_sums import add_column_sums
from twinstream.executor.kernels.triton_kernels.cross_entropy import cross_entropy
from twinstream.executor.kernels.triton_kernels.query_key import rotated_backward, write_rotated
from twinstream.executor.kernels.triton_kernels.rms_norm import rms_norm_backward, write_normed
from twinstream.executor.kernels.triton_kernels.swiglu import swiglu_backward, write_swiglu
from twinstream.executor.kernels.triton_kernels.token_gradients import add_token_gradients
from twinstream.executor.kernels.vector_ops import (
    AdamwConstants,
    AdamwState,
    HeadNormBackward,
    LogitRows,
    NormGradients,
    SortedTokens,
    VectorGradient,
)
from twinstream.executor.kernels.workspace import Workspace


class TritonVector:
    """Implements `VectorOps`."""

    product_with_backward = True

    def write_normed(
        self,
        norm: RmsNorm,
        out_TD: torch.Tensor,
        *,
        eps: float | None = None,
        residual_TD: torch.Tensor | None = None,
    ) -> None:
        write_normed(norm, out_TD, eps, residual_TD)

    def rms_norm_backward(
        self, norm: RmsNorm, gradients: NormGradients, workspace: Workspace
    ) -> None:
        rms_norm_backward(norm, gradients, workspace)

    def write_rotated(
        self, x_THE: torch.Tensor, norm: HeadNorm | None, rope: Rope, out_THE: torch.Tensor
    ) -> None:
        write_rotated(x_THE, norm, rope, out_THE)

    def rotated_backward(
        self, d_THE: torch.Tensor, rope: Rope, norm: HeadNormBackward | None, workspace: Workspace
    ) -> None:
        rotated_backward(d_THE, rope, norm, workspace)

    def write_swiglu(self, gate_up_T2F: torch.Tensor, out_TF: torch.Tensor) -> None:
        write_swiglu(gate_up_T2F, out_TF)

    def swiglu_backward(
        self, gate_up_T2F: torch.Tensor, d_T2F: torch.Tensor, product_TF: torch.Tensor | None
    ) -> None:
        swiglu_backward(gate_up_T2F, d_T2F, product_TF)

    def add_column_sums(
        self, x_TD: torch.Tensor, gradient: VectorGradient, workspace: Workspace
    ) -> None:
        add_column_sums(x_TD, gradient, workspace)

    def cross_entropy(self, rows: LogitRows, workspace: Workspace) -> None:
        cross_entropy(rows)

    def add_token_gradients(
        self,
        d_hidden_TD: torch.Tensor,
        tokens: SortedTokens,
        gradient_VD: torch.Tensor,
        workspace: Workspace,
    ) -> None:
        add_token_gradients(d_hidden_TD, tokens, gradient_VD)

    def adamw(self, state: AdamwState, constants: AdamwConstants) -> None:
        adamw(state, constants)
