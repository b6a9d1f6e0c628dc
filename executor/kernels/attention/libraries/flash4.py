"""FlashAttention-4 of the package flash-attn-4, compiled from Python on first use.

Its causal mask is bottom-right; it takes fewer key heads as they are, and writes outputs,
log-sum-exps and gradients into tensors it is given. Its backward is asked for the deterministic
order of sums, kept by semaphores. In the beta read, the backward runs on compute capability 9 to
12, and is deterministic on 9 to 11; hence these.

Source of the interface: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36.
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


class Flash4:
    """The functions below flash_attn.cute's autograd functions."""

    def forward(self, call: WritingForward, workspace: Workspace) -> None:
        inputs, result = call.inputs, call.result
        packed = call.starts is None and result.lse.shape[0] > 1
        lse = result.lse
        if packed:  # log-sum-exps are wanted dense
            lse = workspace.take(tuple(lse.shape), torch.float32)
        library = importlib.import_module("flash_attn.cute.interface")
        library._flash_attn_fwd(
            inputs.q, inputs.k, inputs.v, softmax_scale=inputs.scale, causal=True, num_splits=1,
            return_lse=True, out=result.out, lse=lse, **cumulative_lengths(call.starts),
        )  # fmt: skip
        if packed:
            result.lse.copy_(lse)

    def backward(self, call: WritingBackward) -> None:
        library = importlib.import_module("flash_attn.cute.interface")
        inputs, result, into = call.inputs, call.result, call.gradients
        library._flash_attn_bwd(
            inputs.q, inputs.k, inputs.v, result.out, call.d_out, result.lse,
            softmax_scale=inputs.scale, causal=True, deterministic=True, dq=into.d_q, dk=into.d_k,
            dv=into.d_v, **cumulative_lengths(call.starts),
        )  # fmt: skip


def _missing() -> str | None:
    return missing_distribution("flash-attn-4", "pip install --pre flash-attn-4")


FLASH4 = AttentionImplementation.of("flash4", Writing(Flash4()), missing=_missing)
