"""FlashAttention-2 of the package flash-attn, by its compiled module, which writes into slots.

Its causal mask is bottom-right since 2.1; it takes fewer key heads as they are. Its backward is
asked for the deterministic order of sums.

Source of the interface: flash_attn/flash_attn_interface.py of flash-attn 2.7 and 2.8.
"""

import importlib

from twinstream.executor.kernels.attention.implementation import AttentionImplementation
from twinstream.executor.kernels.attention.installed import missing_distribution
from twinstream.executor.kernels.attention.writing import Writing, WritingBackward, WritingForward
from twinstream.executor.kernels.workspace import Workspace

_NO_WINDOW = (-1, -1)
_NO_SOFTCAP = 0.0
_NO_DROPOUT = 0.0
_CAUSAL = True


class Flash2:
    """fwd and bwd of flash_attn_2_cuda, or of unequal lengths varlen_fwd and varlen_bwd.

    Their arguments have no names.
    """

    def forward(self, call: WritingForward, workspace: Workspace) -> None:
        library = importlib.import_module("flash_attn_2_cuda")
        inputs, result, starts = call.inputs, call.result, call.starts
        operands = (inputs.q, inputs.k, inputs.v, result.out)
        rest = (*_NO_WINDOW, _NO_SOFTCAP, False, None)
        if starts is None:
            out, lse, *_ = library.fwd(*operands, None, _NO_DROPOUT, inputs.scale, _CAUSAL, *rest)
        else:
            out, lse, *_ = library.varlen_fwd(
                *operands, starts.tensor, starts.tensor, None, None, None, None, starts.longest,
                starts.longest, _NO_DROPOUT, inputs.scale, False, _CAUSAL, *rest,
            )  # fmt: skip
        if out.data_ptr() != result.out.data_ptr():  # a single query is computed elsewhere
            result.out.copy_(out)
        result.lse.copy_(lse)

    def backward(self, call: WritingBackward) -> None:
        deterministic = True
        library = importlib.import_module("flash_attn_2_cuda")
        inputs, result, starts = call.inputs, call.result, call.starts
        into = call.gradients
        operands = (
            call.d_out, inputs.q, inputs.k, inputs.v, result.out, result.lse, into.d_q, into.d_k,
            into.d_v,
        )  # fmt: skip
        rest = (*_NO_WINDOW, _NO_SOFTCAP, deterministic, None, None)
        if starts is None:
            library.bwd(*operands, None, _NO_DROPOUT, inputs.scale, _CAUSAL, *rest)
        else:
            library.varlen_bwd(
                *operands, starts.tensor, starts.tensor, None, starts.longest, starts.longest,
                _NO_DROPOUT, inputs.scale, False, _CAUSAL, *rest,
            )  # fmt: skip


def _missing() -> str | None:
    return missing_distribution("flash-attn", "pip install flash-attn", (2, 7))


FLASH2 = AttentionImplementation.of("flash2", Writing(Flash2()), missing=_missing)
