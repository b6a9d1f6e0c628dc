"""The vector operations as Triton kernels."""

import torch

from twinstream.executor.kernels.triton_kernels import (
    adamw,
    column_sums,
    cross_entropy,
    query_key,
    rms_norm,
    swiglu,
    token_gradients,
)
from twinstream.executor.kernels.vector.vector_ops import LogitRows, SortedTokens
from twinstream.executor.kernels.workspace import Workspace


class TritonVector:
    """Implements `VectorOps`."""

    product_with_backward = True

    write_normed = staticmethod(rms_norm.write_normed)
    rms_norm_backward = staticmethod(rms_norm.rms_norm_backward)
    write_rotated = staticmethod(query_key.write_rotated)
    rotated_backward = staticmethod(query_key.rotated_backward)
    write_swiglu = staticmethod(swiglu.write_swiglu)
    swiglu_backward = staticmethod(swiglu.swiglu_backward)
    add_column_sums = staticmethod(column_sums.add_column_sums)
    adamw = staticmethod(adamw.adamw)

    def cross_entropy(self, rows: LogitRows, workspace: Workspace) -> None:
        cross_entropy.cross_entropy(rows)

    def add_token_gradients(
        self,
        d_hidden_TD: torch.Tensor,
        tokens: SortedTokens,
        gradient_VD: torch.Tensor,
        workspace: Workspace,
    ) -> None:
        token_gradients.add_token_gradients(d_hidden_TD, tokens, gradient_VD)
