"""cuDNN's fused attention through PyTorch, which is torch's default on Hopper.

Torch offers its causal mask top-left only. It is not deterministic: torch has no way to ask cuDNN
for its deterministic backward. It takes fewer key heads as they are, but not where lengths are
unequal: those are called one by one, and of one token by eager attention, since torch knows cuDNN
not to take a sequence of one. Log-sum-exps are [B, H, S, 1].
"""

import torch

from twinstream.executor.kernels.attention.eager import EagerCalls
from twinstream.executor.kernels.attention.implementation import AttentionImplementation
from twinstream.executor.kernels.attention.libraries.sdpa import Saved, Sdpa, Tensors3, unused_seed
from twinstream.executor.kernels.attention.packing import OneByOne
from twinstream.executor.kernels.attention.returning import Returning
from twinstream.executor.kernels.workspace import Workspace


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """With no mask but `is_causal`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(3)


def _backward(
    d_out: torch.Tensor, saved: Saved, workspace: Workspace, *, scale: float, causal: bool
) -> Tensors3:
    seed, lse = unused_seed(workspace), saved.lse.unsqueeze(3)
    found: Tensors3 = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        d_out, saved.q, saved.k, saved.v, saved.out, lse, seed, seed, None, None, None,
        saved.q.shape[2], saved.k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return found


def _missing() -> str | None:
    if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return "torch has no cuDNN here: install a CUDA build of torch"


_CALLS = OneByOne(Returning(Sdpa(_forward, _backward), "top_left"), of_one_token=EagerCalls())

SDPA_CUDNN = AttentionImplementation.of("sdpa_cudnn", _CALLS, missing=_missing)
