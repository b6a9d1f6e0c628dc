"""cuDNN's fused attention through PyTorch, which is torch's default on Hopper.

Torch offers its causal mask top-left only. It is not deterministic: torch has no way to ask cuDNN
for its deterministic backward. It takes fewer key heads as they are; log-sum-exps are [B, H, S, 1].
Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim.
"""

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.attention.returning import Returning
from twinstream.executor.kernels.attention.sdpa_flash import unused_seed
from twinstream.executor.kernels.workspace import Workspace


class SdpaCudnn:
    """aten::_scaled_dot_product_cudnn_attention, with no mask but `is_causal`."""

    def forward(
        self, inputs: AttentionInputs, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=inputs.scale
        )
        return out.transpose(1, 2), lse.squeeze(3)

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
        seed, lse = unused_seed(workspace), result.lse.unsqueeze(3)
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            d_out, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0,
            causal, scale=inputs.scale,
        )  # fmt: skip
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2)


def _missing() -> str | None:
    if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return "torch has no cuDNN here: install a CUDA build of torch"


_CALLS = Returning(SdpaCudnn(), "top_left")

SDPA_CUDNN = AttentionImplementation(
    name="sdpa_cudnn",
    deterministic=False,
    missing=_missing,
    forward=_CALLS.forward,
    backward=_CALLS.backward,
)
