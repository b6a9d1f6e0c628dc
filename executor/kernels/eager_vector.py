"""The vector operations in torch ops: they run everywhere, and are the oracle of the others."""

import torch

from twinstream.executor.kernels.adamw import update_adamw
from twinstream.executor.kernels.cross_entropy import cross_entropy
from twinstream.executor.kernels.gradients import add_vector
from twinstream.executor.kernels.query_key import (
    HeadNorm,
    normed_rotated_backward,
    rotated_backward,
    write_rotated,
)
from twinstream.executor.kernels.rms_norm import (
    RmsNorm,
    rms_norm_backward,
    write_normed,
    write_rstd,
)
from twinstream.executor.kernels.rope import Rope
from twinstream.executor.kernels.row_blocks import row_blocks
from twinstream.executor.kernels.swiglu import swiglu_backward, write_swiglu
from twinstream.executor.kernels.token_gradients import add_token_gradients
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


class EagerVector:
    """Implements `VectorOps`."""

    product_with_backward = False

    def write_normed(
        self,
        norm: RmsNorm,
        out_TD: torch.Tensor,
        *,
        eps: float | None = None,
        residual_TD: torch.Tensor | None = None,
    ) -> None:
        if residual_TD is not None:
            norm.x.add_(residual_TD)
        if eps is not None:
            write_rstd(norm.x, eps, norm.rstd)
        write_normed(norm, out_TD)

    def rms_norm_backward(
        self, norm: RmsNorm, gradients: NormGradients, workspace: Workspace
    ) -> None:
        d_weight = rms_norm_backward(
            norm, gradients.d_out, gradients.d_x, accumulate=gradients.accumulate
        )
        add_vector(gradients.d_weight.tensor, d_weight, gradients.d_weight.mode)

    def write_rotated(
        self, x_THE: torch.Tensor, norm: HeadNorm | None, rope: Rope, out_THE: torch.Tensor
    ) -> None:
        write_rotated(x_THE, norm, rope, out_THE)

    def rotated_backward(
        self, d_THE: torch.Tensor, rope: Rope, norm: HeadNormBackward | None, workspace: Workspace
    ) -> None:
        if norm is None:
            rotated_backward(d_THE, rope)
            return
        d_weight = normed_rotated_backward(d_THE, norm.x, norm.norm, rope)
        add_vector(norm.d_weight.tensor, d_weight, norm.d_weight.mode)

    def write_swiglu(self, gate_up_T2F: torch.Tensor, out_TF: torch.Tensor) -> None:
        write_swiglu(gate_up_T2F, out_TF)

    def swiglu_backward(
        self, gate_up_T2F: torch.Tensor, d_T2F: torch.Tensor, product_TF: torch.Tensor | None
    ) -> None:
        if product_TF is not None:
            write_swiglu(gate_up_T2F, product_TF)
        swiglu_backward(gate_up_T2F, d_T2F)

    def add_column_sums(
        self, x_TD: torch.Tensor, gradient: VectorGradient, workspace: Workspace
    ) -> None:
        sums = torch.zeros(x_TD.shape[1], dtype=torch.float32, device=x_TD.device)
        for rows in row_blocks(*x_TD.shape):
            sums += x_TD[rows].sum(0, dtype=torch.float32)
        add_vector(gradient.tensor, sums, gradient.mode)

    def cross_entropy(self, rows: LogitRows, workspace: Workspace) -> None:
        cross_entropy(rows, workspace)

    def add_token_gradients(
        self,
        d_hidden_TD: torch.Tensor,
        tokens: SortedTokens,
        gradient_VD: torch.Tensor,
        workspace: Workspace,
    ) -> None:
        add_token_gradients(d_hidden_TD, tokens, gradient_VD, workspace)

    def adamw(self, state: AdamwState, constants: AdamwConstants) -> None:
        update_adamw(state, constants)
