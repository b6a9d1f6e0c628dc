"""FlashAttention 2, 3 and 4: they write into slots, and their causal mask is bottom-right.

They take fewer key heads as they are, and packed sequences of any lengths in one call, without
the dimension of the batch: Q [T, H, D], K and V [T, K, D], log-sum-exps [H, T], T the tokens of
all. Each backward is asked for the deterministic order of sums.

Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim.
"""

import importlib
from abc import abstractmethod
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.attention.dense_lse import dense_lse
from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
    Starts,
)
from twinstream.executor.kernels.workspace import Workspace

_NO_WINDOW = (-1, -1)
_NO_SOFTCAP = 0.0
_NO_DROPOUT = 0.0
_DETERMINISTIC = True


@dataclass(frozen=True)
class FlashCall:
    """With `starts`, sequences are packed, and the tensors without the dimension of the batch."""

    inputs: AttentionInputs
    result: AttentionResult
    starts: Starts | None
    workspace: Workspace

    @classmethod
    def of(
        cls, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> "FlashCall":
        starts = inputs.starts
        if starts is None:
            return cls(inputs, result, None, workspace)
        flat = AttentionInputs(inputs.q[0], inputs.k[0], inputs.v[0], inputs.scale)
        return cls(flat, AttentionResult(result.out[0], result.lse[0]), starts, workspace)

    @property
    def narrowed(self) -> Starts | None:
        return None if self.starts is None else self.starts.narrowed(self.inputs.q.shape[-2])


class Flash(AttentionImplementation):
    """Common parts of the libraries that write into slots and mask bottom-right."""

    takes_packed = True

    def _forward(
        self, inputs: AttentionInputs, result: AttentionResult, workspace: Workspace
    ) -> None:
        with workspace.frame():
            self._write_result(FlashCall.of(inputs, result, workspace))

    def _backward(
        self, inputs: AttentionInputs, result: AttentionResult, gradients: AttentionGradients,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        with workspace.frame():
            dense = AttentionResult(result.out, dense_lse(result.lse, workspace))
            d_kv = gradients.d_kv
            if gradients.accumulate:
                d_kv = workspace.take(tuple(d_kv.shape), inputs.k.dtype)
            d_out, d_q, into = gradients.d_out, gradients.d_q, d_kv
            if inputs.starts is not None:
                d_out, d_q, into = d_out[0], d_q[0], d_kv[0]
            call = FlashCall.of(inputs, dense, workspace)
            self._write_gradients(call, AttentionGradients(d_out, d_q, into, accumulate=False))
            if gradients.accumulate:
                gradients.d_kv.add_(d_kv)

    @abstractmethod
    def _write_result(self, call: FlashCall) -> None:
        """Its log-sum-exp may be strided."""

    @abstractmethod
    def _write_gradients(self, call: FlashCall, into: AttentionGradients) -> None:
        """The log-sum-exp is dense."""


class Flash2(Flash):
    """fwd and bwd of flash_attn_2_cuda, or of packed sequences varlen_fwd and varlen_bwd.

    Their arguments have no names. The causal mask is bottom-right since 2.1.

    Source of the interface: flash_attn/flash_attn_interface.py of flash-attn 2.7 and 2.8.
    """

    name = "flash2"

    def _write_result(self, call: FlashCall) -> None:
        inputs, result, starts = call.inputs, call.result, call.narrowed
        library = importlib.import_module("flash_attn_2_cuda")
        operands = (inputs.q, inputs.k, inputs.v, result.out)
        rest = (*_NO_WINDOW, _NO_SOFTCAP, False, None)
        if starts is None:
            out, lse, *_ = library.fwd(
                *operands, None, _NO_DROPOUT, inputs.scale, inputs.causal, *rest
            )
        else:
            out, lse, *_ = library.varlen_fwd(
                *operands, starts.cu_seqlens, starts.cu_seqlens, None, None, None, None,
                starts.longest, starts.longest, _NO_DROPOUT, inputs.scale, False, inputs.causal,
                *rest,
            )  # fmt: skip
        if out.data_ptr() != result.out.data_ptr():  # a single query is computed elsewhere
            result.out.copy_(out)
        result.lse.copy_(lse)

    def _write_gradients(self, call: FlashCall, into: AttentionGradients) -> None:
        inputs, result, starts = call.inputs, call.result, call.narrowed
        library = importlib.import_module("flash_attn_2_cuda")
        operands = (
            into.d_out, inputs.q, inputs.k, inputs.v, result.out, result.lse, into.d_q,
            *into.d_kv.unbind(-3),
        )  # fmt: skip
        rest = (*_NO_WINDOW, _NO_SOFTCAP, _DETERMINISTIC, None, None)
        if starts is None:
            library.bwd(*operands, None, _NO_DROPOUT, inputs.scale, inputs.causal, *rest)
        else:
            library.varlen_bwd(
                *operands, starts.cu_seqlens, starts.cu_seqlens, None, starts.longest,
                starts.longest, _NO_DROPOUT, inputs.scale, False, inputs.causal, *rest,
            )  # fmt: skip


class Flash3(Flash):
    """torch.ops.flash_attn_3.fwd and bwd, for Hopper.

    The deterministic order of sums is there up to head_dim 192. Keys are not split over blocks,
    whose number would depend on the device.

    Source of the interface: hopper/flash_api.cpp of Dao-AILab/flash-attention.
    """

    name = "flash3"

    def _write_result(self, call: FlashCall) -> None:
        inputs, result = call.inputs, call.result
        importlib.import_module("flash_attn_3._C")  # registers the operators
        _, lse, *_ = torch.ops.flash_attn_3.fwd(
            inputs.q, inputs.k, inputs.v, out=result.out, softmax_scale=inputs.scale,
            is_causal=inputs.causal, num_splits=1, **_cumulative_lengths(call.starts),
        )  # fmt: skip
        result.lse.copy_(lse)

    def _write_gradients(self, call: FlashCall, into: AttentionGradients) -> None:
        inputs, result = call.inputs, call.result
        importlib.import_module("flash_attn_3._C")
        d_k, d_v = into.d_kv.unbind(-3)
        torch.ops.flash_attn_3.bwd(
            into.d_out, inputs.q, inputs.k, inputs.v, result.out, result.lse, dq=into.d_q, dk=d_k,
            dv=d_v, softmax_scale=inputs.scale, is_causal=inputs.causal,
            deterministic=_DETERMINISTIC, **_cumulative_lengths(call.starts),
        )  # fmt: skip


class Flash4(Flash):
    """The functions below flash_attn.cute's autograd functions, compiled on first use.

    The order of sums is kept by semaphores. In the beta read, the backward runs on compute
    capability 9 to 12, and is deterministic on 9 to 11.

    Source of the interface: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36.
    """

    name = "flash4"

    def _write_result(self, call: FlashCall) -> None:
        inputs, result = call.inputs, call.result
        packed = call.starts is None and result.lse.shape[0] > 1
        lse = result.lse
        if packed:  # log-sum-exps are wanted dense
            lse = call.workspace.take(tuple(lse.shape), torch.float32)
        library = importlib.import_module("flash_attn.cute.interface")
        library._flash_attn_fwd(
            inputs.q, inputs.k, inputs.v, softmax_scale=inputs.scale, causal=inputs.causal,
            num_splits=1, return_lse=True, out=result.out, lse=lse,
            **_cumulative_lengths(call.starts),
        )  # fmt: skip
        if packed:
            result.lse.copy_(lse)

    def _write_gradients(self, call: FlashCall, into: AttentionGradients) -> None:
        inputs, result = call.inputs, call.result
        d_k, d_v = into.d_kv.unbind(-3)
        library = importlib.import_module("flash_attn.cute.interface")
        library._flash_attn_bwd(
            inputs.q, inputs.k, inputs.v, result.out, into.d_out, result.lse,
            softmax_scale=inputs.scale, causal=inputs.causal, deterministic=_DETERMINISTIC,
            dq=into.d_q, dk=d_k, dv=d_v, **_cumulative_lengths(call.starts),
        )  # fmt: skip


def _cumulative_lengths(starts: Starts | None) -> dict[str, torch.Tensor | int]:
    """The arguments that FlashAttention-3 and 4 take for packed sequences, by their names."""
    if starts is None:
        return {}
    return {
        "cu_seqlens_q": starts.cu_seqlens, "cu_seqlens_k": starts.cu_seqlens,
        "max_seqlen_q": starts.longest, "max_seqlen_k": starts.longest,
    }  # fmt: skip
