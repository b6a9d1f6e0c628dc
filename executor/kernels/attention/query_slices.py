"""A backward pass over slices of queries, each against the keys up to its end.

A kernel that computes the whole rectangle under its causal mask, as cuDNN's deterministic backward
does, computes nothing behind the last query of a slice. dQ is written slice by slice; dK and dV are
summed in float32, in the order of the slices, and rounded once.
"""

from typing import ClassVar

import torch

from twinstream.executor.kernels.attention.cudnn_frontend import CudnnFrontend
from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attention_shape import query_slices


class SlicedQueries(AttentionImplementation):
    """Another implementation, whose backward is called for slices of the queries.

    Packed sequences of unequal lengths are called whole, one by one: slices of each length would
    be other kernels.
    """

    kind: ClassVar[type[AttentionImplementation]]

    def __init__(self) -> None:
        self._whole = self.kind()

    def _for(self, tokens: slice) -> AttentionImplementation:
        return self if tokens == slice(None) else self._whole._for(tokens)

    def _forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        self._whole._forward(inputs, result, workspace)

    def _backward(
        self, inputs: AttentionInputs, result: AttentionResult, gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        num_queries, num_keys = inputs.q.shape[1], inputs.k.shape[1]
        slices = query_slices(num_queries, num_keys)
        if len(slices) == 1:
            self._whole._backward(inputs, result, gradients, workspace)
            return
        with workspace.frame():
            d_kv = gradients.d_kv
            if not gradients.accumulate:
                d_kv = workspace.take(tuple(d_kv.shape), torch.float32).zero_()
            for queries in slices:
                keys = slice(0, num_keys - num_queries + queries.stop)
                self._whole._backward(
                    AttentionInputs(
                        inputs.q[:, queries], inputs.k[:, keys], inputs.v[:, keys], inputs.scale
                    ),
                    AttentionResult(result.out[:, queries], result.lse[:, :, queries]),
                    AttentionGradients(
                        gradients.d_out[:, queries], gradients.d_q[:, queries], d_kv[:, keys],
                        accumulate=True,
                    ),
                    workspace,
                )  # fmt: skip
            if not gradients.accumulate:
                gradients.d_kv.copy_(d_kv)


class CudnnSliced(SlicedQueries):
    """cuDNN's deterministic backward, which computes the masked half of the square, in slices."""

    name = "cudnn_sliced"
    kind = CudnnFrontend
