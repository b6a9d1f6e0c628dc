"""PyTorch's own FlashAttention-2 kernels on CUDA.

Called by its operator, its causal mask is bottom-right (torch.nn.attention.bias relies on it for
`causal_lower_right`); it takes fewer key heads as they are. Its backward adds up dQ by atomics
unless torch is in deterministic mode, which is entered for that call alone, without the filling of
fresh memory that the mode brings along. Legend: B sequences, S queries and C keys of each, H query
heads, K key heads, D head_dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
    nothing_missing,
)
from twinstream.executor.kernels.attention.returning import Returning
from twinstream.executor.kernels.workspace import Workspace

_FILLS = "fill_uninitialized_memory"  # a property of the module, which its stubs do not know


class SdpaFlash:
    """aten::_scaled_dot_product_flash_attention."""

    def forward(
        self, inputs: AttentionInputs, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=inputs.scale
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
        seed = unused_seed(workspace)
        with deterministic_algorithms():
            d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                d_out, q, k, v, out, result.lse, None, None, q.shape[2], k.shape[2], 0.0,
                causal, seed, seed, scale=inputs.scale,
            )  # fmt: skip
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2)


def unused_seed(workspace: Workspace) -> torch.Tensor:
    """What the operators take as the state of dropout, and do not look at without any."""
    return workspace.take((2,), torch.int64)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Torch's deterministic mode, with what was set before put back at the end."""
    mode = torch.get_deterministic_debug_mode()
    fills = getattr(torch.utils.deterministic, _FILLS)
    setattr(torch.utils.deterministic, _FILLS, False)
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        setattr(torch.utils.deterministic, _FILLS, fills)


_CALLS = Returning(SdpaFlash(), "bottom_right")

SDPA_FLASH = AttentionImplementation(
    name="sdpa_flash",
    deterministic=True,
    missing=nothing_missing,
    forward=_CALLS.forward,
    backward=_CALLS.backward,
)
