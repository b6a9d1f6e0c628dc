"""PyTorch's own FlashAttention-2 kernels on CUDA.

Called by its operator, its causal mask is bottom-right (torch.nn.attention.bias relies on it for
`causal_lower_right`); it takes fewer key heads as they are, and sequences of unequal lengths by the
operator that torch.nn.attention.varlen calls. Its backward adds up dQ by atomics unless torch is in
deterministic mode, which is entered for that call alone, without the filling of fresh memory that
the mode brings along. Legend: T tokens of sequences of unequal lengths, H query heads, K key heads,
D head_dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.attention.libraries.sdpa import Saved, Sdpa, Tensors3, unused_seed
from twinstream.executor.kernels.attention.packing import Starts
from twinstream.executor.kernels.attention.returning import Returning
from twinstream.executor.kernels.workspace import Workspace

_FILLS = "fill_uninitialized_memory"  # a property of the module, which its stubs do not know


class SdpaFlash:
    """aten::_scaled_dot_product_flash_attention, or of unequal lengths _flash_attention."""

    def __init__(self) -> None:
        self._equal = Sdpa(_forward, _backward)

    def forward(
        self, inputs: AttentionInputs, workspace: Workspace, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not inputs.lengths:
            return self._equal.forward(inputs, workspace, causal=causal)
        starts = Starts.of(inputs.lengths, inputs.q.device, workspace)
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            inputs.q[0], inputs.k[0], inputs.v[0], starts.tensor, starts.tensor, starts.longest,
            starts.longest, 0.0, causal, False, scale=inputs.scale,
        )  # fmt: skip
        return out_THD[None], lse_HT[None]

    def backward(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        workspace: Workspace,
        *,
        causal: bool,
    ) -> Tensors3:
        if not inputs.lengths:
            return self._equal.backward(inputs, result, d_out_BSHD, workspace, causal=causal)
        starts = Starts.of(inputs.lengths, inputs.q.device, workspace)
        seed = unused_seed(workspace)
        with deterministic_algorithms():
            d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
                d_out_BSHD[0], inputs.q[0], inputs.k[0], inputs.v[0], result.out[0], result.lse[0],
                starts.tensor, starts.tensor, starts.longest, starts.longest, 0.0, causal, seed,
                seed, scale=inputs.scale,
            )  # fmt: skip
        return d_q[None], d_k[None], d_v[None]


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def _backward(
    d_out: torch.Tensor, saved: Saved, workspace: Workspace, *, scale: float, causal: bool
) -> Tensors3:
    seed = unused_seed(workspace)
    with deterministic_algorithms():
        found: Tensors3 = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            d_out, saved.q, saved.k, saved.v, saved.out, saved.lse, None, None, saved.q.shape[2],
            saved.k.shape[2], 0.0, causal, seed, seed, scale=scale,
        )  # fmt: skip
    return found


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


SDPA_FLASH = AttentionImplementation.of("sdpa_flash", Returning(SdpaFlash(), "bottom_right"))
