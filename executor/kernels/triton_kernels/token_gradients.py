"""Sums of the rows that belong to the same id, without atomics. T tokens, D d_model.

Tokens are sorted by id. The program of a run's first token adds up the run's rows in order, for
some columns; those of the other tokens have nothing to do.
"""

import torch
import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.launch import launch, warps_for
from twinstream.executor.kernels.triton_kernels.rounding import rounded
from twinstream.executor.kernels.vector.vector_ops import SortedTokens
from twinstream.executor.kernels.workspace import Workspace

# Columns of a program: few, so that a long run is shared by several.
_BLOCK = 512
_UNROLLED = tl.constexpr(8)  # rows of a run that are loaded at once; they are added one by one


def add_token_gradients(
    d_hidden_TD: torch.Tensor, tokens: SortedTokens, gradient_VD: torch.Tensor,
    workspace: Workspace,
) -> None:  # fmt: skip
    num_tokens, d_model = d_hidden_TD.shape
    block = min(_BLOCK, triton.next_power_of_2(d_model))
    launch(
        _token_gradients_kernel, (num_tokens, triton.cdiv(d_model, block)), d_hidden_TD,
        tokens.ids, tokens.order, tokens.last, gradient_VD, d_hidden_TD.stride(0),
        gradient_VD.stride(0), d_model, BLOCK=block, num_warps=warps_for(block, 8),
    )  # fmt: skip


@triton.jit
def _token_gradients_kernel(
    d_hidden_ptr, ids_ptr, order_ptr, last_ptr, gradient_ptr, d_hidden_stride, gradient_stride,
    d_model, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d_model
    token_id = tl.load(ids_ptr + token)
    id_before = tl.load(ids_ptr + token - 1, mask=token > 0, other=-1)
    if token_id != id_before:
        sums = tl.zeros([BLOCK], dtype=tl.float32)
        end = tl.load(last_ptr + token).to(tl.int32) + 1
        for index in tl.range(token, end, loop_unroll_factor=_UNROLLED):
            row = tl.load(order_ptr + index)
            d_hidden = d_hidden_ptr + row * d_hidden_stride + columns
            sums += tl.load(d_hidden, mask=inside, other=0.0).to(tl.float32)
        gradient = gradient_ptr + token_id * gradient_stride + columns
        sums += tl.load(gradient, mask=inside, other=0.0).to(tl.float32)
        tl.store(gradient, rounded(sums, gradient_ptr.dtype.element_ty), mask=inside)
