"""FlashAttention-3, for Hopper, by its operators, which write into slots.

Its causal mask is bottom-right; it takes fewer key heads as they are. Its backward is asked for the
deterministic order of sums, which it has up to head_dim 192. Keys are not split over blocks, whose
number would depend on the device. Legend: B sequences, S queries and C keys of each, H query heads,
K key heads, D head_dim.

Source of the interface: hopper/flash_api.cpp of Dao-AILab/flash-attention.
"""

import importlib

import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.attention.installed import missing_distribution
from twinstream.executor.kernels.attention.writing import Gradients, Writing
from twinstream.executor.kernels.workspace import Workspace


class Flash3:
    """torch.ops.flash_attn_3.fwd and bwd."""

    def forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        importlib.import_module("flash_attn_3._C")  # registers the operators
        _, lse, *_ = torch.ops.flash_attn_3.fwd(
            inputs.q, inputs.k, inputs.v, out=result.out, softmax_scale=inputs.scale,
            is_causal=True, num_splits=1,
        )  # fmt: skip
        result.lse.copy_(lse)

    def backward(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        gradients: Gradients,
    ) -> None:
        importlib.import_module("flash_attn_3._C")
        torch.ops.flash_attn_3.bwd(
            d_out_BSHD, inputs.q, inputs.k, inputs.v, result.out, result.lse, dq=gradients.d_q,
            dk=gradients.d_k, dv=gradients.d_v, softmax_scale=inputs.scale, is_causal=True,
            deterministic=True,
        )  # fmt: skip


def _missing() -> str | None:
    return missing_distribution(
        "flash-attn-3", "build the folder hopper of github.com/Dao-AILab/flash-attention"
    )


_CALLS = Writing(Flash3())

FLASH3 = AttentionImplementation(
    name="flash3",
    deterministic=True,
    missing=_missing,
    forward=_CALLS.forward,
    backward=_CALLS.backward,
)
