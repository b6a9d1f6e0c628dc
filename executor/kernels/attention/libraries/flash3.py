"""FlashAttention-3, for Hopper, by its operators, which write into slots.

Its causal mask is bottom-right; it takes fewer key heads as they are. Its backward is asked for the
deterministic order of sums, which it has up to head_dim 192. Keys are not split over blocks, whose
number would depend on the device.

Source of the interface: hopper/flash_api.cpp of Dao-AILab/flash-attention.
"""

import importlib

import torch

from twinstream.executor.kernels.attention.implementation import AttentionImplementation
from twinstream.executor.kernels.attention.installed import missing_distribution
from twinstream.executor.kernels.attention.writing import (
    Writing,
    WritingBackward,
    WritingForward,
    cumulative_lengths,
)
from twinstream.executor.kernels.workspace import Workspace


class Flash3:
    """torch.ops.flash_attn_3.fwd and bwd."""

    def forward(self, call: WritingForward, workspace: Workspace) -> None:
        importlib.import_module("flash_attn_3._C")  # registers the operators
        inputs, result = call.inputs, call.result
        _, lse, *_ = torch.ops.flash_attn_3.fwd(
            inputs.q, inputs.k, inputs.v, out=result.out, softmax_scale=inputs.scale,
            is_causal=True, num_splits=1, **cumulative_lengths(call.starts),
        )  # fmt: skip
        result.lse.copy_(lse)

    def backward(self, call: WritingBackward) -> None:
        importlib.import_module("flash_attn_3._C")
        inputs, result, into = call.inputs, call.result, call.gradients
        torch.ops.flash_attn_3.bwd(
            call.d_out, inputs.q, inputs.k, inputs.v, result.out, result.lse, dq=into.d_q,
            dk=into.d_k, dv=into.d_v, softmax_scale=inputs.scale, is_causal=True,
            deterministic=True, **cumulative_lengths(call.starts),
        )  # fmt: skip


def _missing() -> str | None:
    return missing_distribution(
        "flash-attn-3", "build the folder hopper of github.com/Dao-AILab/flash-attention"
    )


FLASH3 = AttentionImplementation.of("flash3", Writing(Flash3()), missing=_missing)
