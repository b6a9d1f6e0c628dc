"""silu(gate) * up, forward and backward. Legend: T tokens, F FFN width."""

import torch
import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.launch import device_function, launch
from twinstream.executor.kernels.triton_kernels.rounding import rounded

# 16 elements a thread: two loads of 16 bytes of each bf16 operand.
_BLOCK, _WARPS = 2048, 4


def write_swiglu(gate_up_T2F: torch.Tensor, out_TF: torch.Tensor) -> None:
    num_tokens, d_ff = out_TF.shape
    launch(
        _swiglu_kernel, (num_tokens, triton.cdiv(d_ff, _BLOCK)), gate_up_T2F, out_TF,
        gate_up_T2F.stride(0), out_TF.stride(0), d_ff, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def swiglu_backward(
    gate_up_T2F: torch.Tensor, d_T2F: torch.Tensor, product_TF: torch.Tensor | None
) -> None:
    num_tokens, d_ff = d_T2F.shape[0], d_T2F.shape[1] // 2
    out_TF = d_T2F if product_TF is None else product_TF  # which is not written unless asked for
    launch(
        _swiglu_backward_kernel, (num_tokens, triton.cdiv(d_ff, _BLOCK)), gate_up_T2F, d_T2F,
        out_TF, gate_up_T2F.stride(0), d_T2F.stride(0), out_TF.stride(0), d_ff,
        HAS_PRODUCT=product_TF is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


@device_function
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, out_ptr, gate_up_stride, out_stride, d_ff, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d_ff
    gates = gate_up_ptr + token * gate_up_stride + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + d_ff, mask=inside, other=0.0).to(tl.float32)
    product = rounded(_sigmoid(gate) * gate * up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + columns, product, mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    gate_up_ptr, d_ptr, product_ptr, gate_up_stride, d_stride, product_stride, d_ff,
    HAS_PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d_ff
    gates = gate_up_ptr + token * gate_up_stride + columns
    d_gates = d_ptr + token * d_stride + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + d_ff, mask=inside, other=0.0).to(tl.float32)
    d_product = tl.load(d_gates + d_ff, mask=inside, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gate)
    silu = sigmoid * gate
    d_silu = sigmoid + silu * (1.0 - sigmoid)
    dtype = d_ptr.dtype.element_ty
    tl.store(d_gates + d_ff, rounded(d_product * silu, dtype), mask=inside)
    if HAS_PRODUCT:
        products = product_ptr + token * product_stride + columns
        tl.store(products, rounded(silu * up, product_ptr.dtype.element_ty), mask=inside)
    tl.store(d_gates, rounded(d_silu * d_product * up, dtype), mask=inside)
