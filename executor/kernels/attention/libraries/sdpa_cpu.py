"""PyTorch's flash attention for CPUs: heads in parallel over the threads, no sum across them.

Its causal mask is top-left; it takes fewer key heads as they are.
"""

import torch

from twinstream.executor.kernels.attention.implementation import AttentionImplementation
from twinstream.executor.kernels.attention.libraries.sdpa import Saved, Sdpa, Tensors3
from twinstream.executor.kernels.attention.packing import OneByOne
from twinstream.executor.kernels.attention.returning import Returning
from twinstream.executor.kernels.workspace import Workspace


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    return out, lse


def _backward(
    d_out: torch.Tensor, saved: Saved, workspace: Workspace, *, scale: float, causal: bool
) -> Tensors3:
    found: Tensors3 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, saved.q, saved.k, saved.v, saved.out, saved.lse, 0.0, causal, scale=scale
    )
    return found


_CALLS = OneByOne(Returning(Sdpa(_forward, _backward), "top_left"))

SDPA_CPU = AttentionImplementation.of("sdpa_cpu", _CALLS)
