"""PyTorch's own attention kernels, by the operators below scaled_dot_product_attention.

Legend: B sequences, S queries and C keys of each, H query heads, K key heads, D head_dim, T tokens
of packed sequences. The operators have heads before tokens, [B, H, S, D].
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from twinstream.executor.kernels.attention.eager import EagerAttention
from twinstream.executor.kernels.attention.implementation import (
    ALL_TOKENS,
    AttentionImplementation,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.attention.returning import Returning
from twinstream.executor.kernels.workspace import Workspace

_FILLS = "fill_uninitialized_memory"  # a property of the module, which its stubs do not know


class SdpaCpu(Returning):
    """Flash attention for CPUs: heads in parallel over the threads, no sum across them.

    Its causal mask is top-left; it takes fewer key heads as they are.
    """

    name = "sdpa_cpu"
    masks_top_left = True

    def _out_and_lse(
        self, inputs: AttentionInputs, workspace: Workspace, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_swapped(inputs.q, inputs.k, inputs.v), 0.0, causal, scale=inputs.scale
        )
        return out.transpose(1, 2), lse

    def _gradients(
        self, inputs: AttentionInputs, result: AttentionResult, d_out_BSHD: torch.Tensor,
        workspace: Workspace, *, causal: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        saved = _swapped(inputs.q, inputs.k, inputs.v, result.out)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out_BSHD.transpose(1, 2), *saved, result.lse, 0.0, causal, scale=inputs.scale
        )
        return _swapped(*found)


class SdpaCudnn(Returning):
    """cuDNN's fused attention, which is torch's default on Hopper.

    Torch offers its causal mask top-left only. It is not deterministic: torch has no way to ask
    cuDNN for its deterministic backward. It takes fewer key heads as they are, but no packed
    sequences: those are called one by one, and of one token by eager attention, since
    torch knows cuDNN not to take a sequence of one. Log-sum-exps are [B, H, S, 1].
    """

    name = "sdpa_cudnn"
    masks_top_left = True

    def missing(self) -> str | None:
        if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            return None
        return "torch has no cuDNN here: install a CUDA build of torch"

    def _for(self, tokens: slice) -> AttentionImplementation:
        of_one = tokens != ALL_TOKENS and tokens.stop - tokens.start == 1
        return EagerAttention() if of_one else self

    def _out_and_lse(
        self, inputs: AttentionInputs, workspace: Workspace, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_swapped(inputs.q, inputs.k, inputs.v), None, True, 0.0, causal, False,
            scale=inputs.scale,
        )  # fmt: skip
        return out.transpose(1, 2), lse.squeeze(3)

    def _gradients(
        self, inputs: AttentionInputs, result: AttentionResult, d_out_BSHD: torch.Tensor,
        workspace: Workspace, *, causal: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        saved, seed = _swapped(inputs.q, inputs.k, inputs.v, result.out), _unused_seed(workspace)
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            d_out_BSHD.transpose(1, 2), *saved, result.lse.unsqueeze(3), seed, seed, None, None,
            None, inputs.q.shape[1], inputs.k.shape[1], 0.0, causal, scale=inputs.scale,
        )  # fmt: skip
        return _swapped(*found)


class SdpaFlash(Returning):
    """FlashAttention-2 on CUDA, or of packed sequences the operator of torch.nn.attention.varlen.

    Called by its operator, its causal mask is bottom-right (torch.nn.attention.bias relies on it
    for `causal_lower_right`); it takes fewer key heads as they are. Its backward adds up dQ by
    atomics unless torch is in deterministic mode, which is entered for that call alone, without
    the filling of fresh memory that the mode brings along.
    """

    name = "sdpa_flash"
    takes_packed = True

    def _out_and_lse(
        self, inputs: AttentionInputs, workspace: Workspace, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if inputs.starts is None:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                *_swapped(inputs.q, inputs.k, inputs.v), 0.0, causal, False, scale=inputs.scale
            )
            return out.transpose(1, 2), lse
        starts, longest = _starts_and_longest(inputs)
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            inputs.q[0], inputs.k[0], inputs.v[0], starts, starts, longest, longest, 0.0, causal,
            False, scale=inputs.scale,
        )  # fmt: skip
        return out_THD[None], lse_HT[None]

    def _gradients(
        self, inputs: AttentionInputs, result: AttentionResult, d_out_BSHD: torch.Tensor,
        workspace: Workspace, *, causal: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        seed = _unused_seed(workspace)
        if inputs.starts is None:
            saved = _swapped(inputs.q, inputs.k, inputs.v, result.out)
            with deterministic_algorithms():
                found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                    d_out_BSHD.transpose(1, 2), *saved, result.lse, None, None, inputs.q.shape[1],
                    inputs.k.shape[1], 0.0, causal, seed, seed, scale=inputs.scale,
                )  # fmt: skip
            return _swapped(*found)
        starts, longest = _starts_and_longest(inputs)
        with deterministic_algorithms():
            d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
                d_out_BSHD[0], inputs.q[0], inputs.k[0], inputs.v[0], result.out[0], result.lse[0],
                starts, starts, longest, longest, 0.0, causal, seed, seed, scale=inputs.scale,
            )  # fmt: skip
        return d_q[None], d_k[None], d_v[None]


def _starts_and_longest(inputs: AttentionInputs) -> tuple[torch.Tensor, int]:
    assert inputs.starts is not None, "sequences are packed"
    starts = inputs.starts.narrowed(inputs.q.shape[2])
    return starts.cu_seqlens, starts.longest


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


def _unused_seed(workspace: Workspace) -> torch.Tensor:
    """What operators take as the state of dropout, and do not look at without any."""
    return workspace.take((2,), torch.int64)


def _swapped(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)
