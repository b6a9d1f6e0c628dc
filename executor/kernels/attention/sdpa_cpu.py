"""PyTorch's flash attention for CPUs: heads in parallel over the threads, no sum across them.

Its causal mask is top-left. Legend: B sequences, S queries and C keys of each, H query heads, K
key heads, D head_dim.
"""

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
    nothing_missing,
)
from twinstream.executor.kernels.attention.returning import Returning
from twinstream.executor.kernels.workspace import Workspace


class SdpaCpu:
    """aten::_scaled_dot_product_flash_attention_for_cpu; takes fewer key heads as they are."""

    def forward(
        self, inputs: AttentionInputs, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=inputs.scale
        )
        return out.transpose(1, 2), lse

    def backward(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        workspace: Workspace,
        *,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        out, d_out = result.out.transpose(1, 2), d_out_BSHD.transpose(1, 2)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_q, d_k, d_v = backward(d_out, q, k, v, out, result.lse, 0.0, causal, scale=inputs.scale)
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2)


_CALLS = Returning(SdpaCpu(), "top_left")

SDPA_CPU = AttentionImplementation(
    name="sdpa_cpu",
    deterministic=True,
    missing=nothing_missing,
    forward=_CALLS.forward,
    backward=_CALLS.backward,
)
