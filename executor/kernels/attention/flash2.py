"""FlashAttention-2 of the package flash-attn, by its compiled module, which writes into slots.

Its causal mask is bottom-right since 2.1; it takes fewer key heads as they are. Its backward is
asked for the deterministic order of sums. Legend: B sequences, S queries and C keys of each, H
query heads, K key heads, D head_dim.

Source of the interface: flash_attn/flash_attn_interface.py of flash-attn 2.7 and 2.8.
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

_NO_WINDOW = (-1, -1)
_NO_SOFTCAP = 0.0
_NO_DROPOUT = 0.0


class Flash2:
    """flash_attn_2_cuda.fwd and bwd; their arguments have no names."""

    def forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        library = importlib.import_module("flash_attn_2_cuda")
        out, lse, *_ = library.fwd(
            inputs.q, inputs.k, inputs.v, result.out, None, _NO_DROPOUT, inputs.scale, True,
            *_NO_WINDOW, _NO_SOFTCAP, False, None,
        )  # fmt: skip
        if out.data_ptr() != result.out.data_ptr():  # a single query is computed elsewhere
            result.out.copy_(out)
        result.lse.copy_(lse)

    def backward(
        self,
        inputs: AttentionInputs,
        result: AttentionResult,
        d_out_BSHD: torch.Tensor,
        gradients: Gradients,
    ) -> None:
        deterministic = True
        library = importlib.import_module("flash_attn_2_cuda")
        library.bwd(
            d_out_BSHD, inputs.q, inputs.k, inputs.v, result.out, result.lse, gradients.d_q,
            gradients.d_k, gradients.d_v, None, _NO_DROPOUT, inputs.scale, True, *_NO_WINDOW,
            _NO_SOFTCAP, deterministic, None, None,
        )  # fmt: skip


def _missing() -> str | None:
    return missing_distribution("flash-attn", "pip install flash-attn", (2, 7))


_CALLS = Writing(Flash2())

FLASH2 = AttentionImplementation(
    name="flash2",
    deterministic=True,
    missing=_missing,
    forward=_CALLS.forward,
    backward=_CALLS.backward,
)
