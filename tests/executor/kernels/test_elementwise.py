"""Norm, RoPE and SwiGLU on more rows than a block holds, against autograd in float64."""

import math

import pytest
import torch

from tests.executor.kernels.driver import LLAMA_3_1
from twinstream.executor.kernels.registry import vector_ops
from twinstream.executor.kernels.vector.rope import Rope
from twinstream.executor.kernels.vector.row_blocks import BLOCK_ELEMENTS
from twinstream.executor.kernels.vector.vector_ops import (
    HeadNorm,
    HeadNormBackward,
    NormGradients,
    RmsNorm,
    VectorGradient,
)
from twinstream.executor.kernels.workspace import Workspace

EAGER, NO_WORKSPACE = vector_ops("eager"), Workspace(torch.empty(0, dtype=torch.uint8))
EPS = 1e-5
# float32 rounding, and for bf16 the one rounding of results and the one of inputs of the next step.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPE = pytest.mark.parametrize("dtype", TOLERANCES)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(x):
    return x.double().requires_grad_()


def assert_close(actual, expected, dtype):
    assert actual.isfinite().all()
    error = (actual.double() - expected).abs().max()
    assert error <= TOLERANCES[dtype] * expected.abs().max()


def normed64(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def stretched(frequency, scaling):
    """As transformers has it, by wavelength, in float64."""
    context, factor = scaling.original_max_position_embeddings, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def rotated64(x, rope):
    """rotate_half, written as a product of complex numbers."""
    half = x.shape[-1] // 2
    token = torch.arange(x.shape[0], dtype=torch.float64)
    position = token % rope.seq_len + rope.chunk_start
    frequency = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if (scaling := rope.scaling) is not None:
        frequency = torch.stack([stretched(f, scaling) for f in frequency])
    angle = position[:, None, None] * frequency
    product = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((product.real, product.imag), -1)


@DTYPE
@pytest.mark.parametrize("accumulate", [False, True])
def test_rms_norm(dtype, accumulate):
    x, weight = randn(1100, 512, dtype=dtype), 1 + randn(512, dtype=dtype, seed=1)
    d_out, before = randn(1100, 512, dtype=dtype, seed=2), randn(1100, 512, dtype=dtype, seed=3)
    assert x.numel() > BLOCK_ELEMENTS
    x64, weight64 = leaf(x), leaf(weight)
    out64 = normed64(x64, weight64)
    out64.backward(d_out.double())

    out, d_x, d_weight = torch.full_like(x, float("nan")), before.clone(), torch.empty(512)
    norm = RmsNorm(x, torch.empty(1100), weight)
    EAGER.write_normed(norm, out, eps=EPS)
    gradients = NormGradients(d_out, d_x, VectorGradient(d_weight, "write"), accumulate)
    EAGER.rms_norm_backward(norm, gradients, NO_WORKSPACE)

    assert_close(out, out64, dtype)
    assert_close(d_x, x64.grad + before.double() * accumulate, dtype)
    assert_close(d_weight, weight64.grad, torch.float32)


@DTYPE
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("seq_len", "chunk_start", "scaling"),
    [(700, 0, None), (10_000, 3_000, None), (10_000, 3_000, LLAMA_3_1)],
)
def test_head_norm_and_rope(dtype, normed, seq_len, chunk_start, scaling):
    x, d = randn(1400, 8, 64, dtype=dtype), randn(1400, 8, 64, dtype=dtype, seed=2)
    weight = 1 + randn(64, dtype=dtype, seed=1)
    assert x.numel() > BLOCK_ELEMENTS
    rope = Rope(10_000.0, 64, seq_len, chunk_start, scaling=scaling)
    norm = HeadNorm(weight, EPS) if normed else None
    x64, weight64 = leaf(x), leaf(weight)
    out64 = rotated64(normed64(x64, weight64) if normed else x64, rope)
    out64.backward(d.double())

    in_place = x.clone()
    EAGER.write_rotated(in_place, norm, rope, in_place)
    assert (in_place.double() - out64).abs().max() <= TOLERANCES[dtype] * out64.abs().max()
    d_weight = torch.empty(64)
    backward = HeadNormBackward(norm, x, VectorGradient(d_weight, "write")) if norm else None
    EAGER.rotated_backward(d, rope, backward, NO_WORKSPACE)
    if norm:
        error = (d_weight - weight64.grad).abs().max() / weight64.grad.abs().max()
        assert error <= 1e-5
    error = (d.double() - x64.grad).abs().max() / x64.grad.abs().max()
    assert error <= TOLERANCES[dtype]


@DTYPE
def test_swiglu(dtype):
    d_ff = 700
    gate_up, d_product = (
        3 * randn(900, 2 * d_ff, dtype=dtype),
        randn(900, d_ff, dtype=dtype, seed=1),
    )
    assert d_product.numel() > BLOCK_ELEMENTS
    gate_up64 = leaf(gate_up)
    product64 = torch.nn.functional.silu(gate_up64[:, :d_ff]) * gate_up64[:, d_ff:]
    product64.backward(d_product.double())

    d = torch.full_like(gate_up, float("nan"))
    EAGER.write_swiglu(gate_up, d[:, :d_ff])
    assert_close(d[:, :d_ff], product64, dtype)
    d[:, d_ff:].copy_(d_product)
    EAGER.swiglu_backward(gate_up, d, None)
    assert_close(d, gate_up64.grad, dtype)
