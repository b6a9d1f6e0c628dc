"""The vector operations in torch ops: they run everywhere, and are the oracle of the others."""

import torch

from twinstream.executor.kernels.vector import cross_entropy, query_key, swiglu, token_gradients
from twinstream.executor.kernels.vector.adamw import update_adamw
from twinstream.executor.kernels.vector.gradients import add_vector
from twinstream.executor.kernels.vector.rms_norm import (
    RmsNorm,
    rms_norm_backward,
    write_normed,
    write_rstd,
)
from twinstream.executor.kernels.vector.rope import Rope
from twinstream.executor.kernels.vector.row_blocks import row_blocks
from twinstream.executor.kernels.vector.vector_ops import (
    HeadNormBackward,
    NormGradients,
    VectorGradient,
)
from twinstream.executor.kernels.workspace import Workspace


class EagerVector:
    """Implements `VectorOps`."""

    product_with_backward = False

    write_rotated = staticmethod(query_key.write_rotated)
    write_swiglu = staticmethod(swiglu.write_swiglu)
    cross_entropy = staticmethod(cross_entropy.cross_entropy)
    add_token_gradients = staticmethod(token_gradients.add_token_gradients)
    adamw = staticmethod(update_adamw)

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

    def rotated_backward(
        self, d_THE: torch.Tensor, rope: Rope, norm: HeadNormBackward | None, workspace: Workspace
    ) -> None:
        if norm is None:
            query_key.rotated_backward(d_THE, rope)
            return
        d_weight = query_key.normed_rotated_backward(d_THE, norm.x, norm.norm, rope)
        add_vector(norm.d_weight.tensor, d_weight, norm.d_weight.mode)

    def swiglu_backward(
        self, gate_up_T2F: torch.Tensor, d_T2F: torch.Tensor, product_TF: torch.Tensor | None
    ) -> None:
        if product_TF is not None:
            swiglu.write_swiglu(gate_up_T2F, product_TF)
        swiglu.swiglu_backward(gate_up_T2F, d_T2F)

    def add_column_sums(
        self, x_TD: torch.Tensor, gradient: VectorGradient, workspace: Workspace
    ) -> None:
        sums = torch.zeros(x_TD.shape[1], dtype=torch.float32, device=x_TD.device)
        for rows in row_blocks(*x_TD.shape):
            sums += x_TD[rows].sum(0, dtype=torch.float32)
        add_vector(gradient.tensor, sums, gradient.mode)
