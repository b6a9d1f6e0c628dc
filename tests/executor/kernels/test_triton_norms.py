"""Triton's norms and RoPE against their eager twins, over odd shapes."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.executor.kernels.driver import LLAMA_3_1
from tests.executor.kernels.twins import DTYPES, assert_twins_agree, randn
from twinstream.executor.kernels.registry import vector_ops
from twinstream.executor.kernels.vector.rope import Rope
from twinstream.executor.kernels.vector.vector_ops import (
    HeadNorm,
    HeadNormBackward,
    NormGradients,
    RmsNorm,
    VectorGradient,
)
from twinstream.executor.run.training import sequences_tensor

EPS = 1e-5
DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 48), (2, 1030)], ids=str)


def norm_of(rows, width, dtype):
    weight = (1 + 0.2 * randn(width, seed=1)).to(dtype)
    return RmsNorm(randn(rows, width, dtype=dtype), randn(rows, seed=2).abs(), weight)


@DTYPE
@SHAPES
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_rstd", [False, True])
def test_norm(triton_device, dtype, shape, with_residual, with_rstd):
    norm, out = norm_of(*shape, dtype), torch.full(shape, float("nan")).to(dtype)
    residual = randn(*shape, dtype=dtype, seed=3)

    def call(ops, workspace, norm, residual, out):
        eps = None if with_rstd else EPS
        ops.write_normed(norm, out, eps=eps, residual_TD=residual if with_residual else None)

    def results(norm, residual, out):
        return {"out": out, "x": norm.x, "rstd": norm.rstd, "residual": residual}

    assert_twins_agree(triton_device, call, norm, residual, out, results=results)


@DTYPE
@SHAPES
@pytest.mark.parametrize(("mode", "accumulate"), [("write", True), ("update", False)])
def test_norm_backward(triton_device, dtype, shape, mode, accumulate):
    before = randn(*shape, dtype=dtype, seed=4)
    d_weight = VectorGradient(randn(shape[1], dtype=dtype, seed=5), mode)
    gradients = NormGradients(randn(*shape, dtype=dtype, seed=3), before, d_weight, accumulate)
    assert_twins_agree(
        triton_device, backward, norm_of(*shape, dtype), gradients, results=norm_results
    )


def backward(ops, workspace, norm, gradients):
    ops.rms_norm_backward(norm, gradients, workspace)


def norm_results(norm, gradients):
    return {"d_x": gradients.d_x, "d_weight": gradients.d_weight.tensor}


def test_norm_backward_with_more_rows_than_programs(triton_device):
    """265 rows are two for each of 133 programs; the other 131 have none."""
    shape, f32 = (265, 3), torch.float32
    d_weight = VectorGradient(randn(3, seed=5), "update")
    gradients = NormGradients(randn(*shape, seed=3), randn(*shape, seed=4), d_weight, True)
    assert_twins_agree(
        triton_device, backward, norm_of(*shape, f32), gradients, results=norm_results
    )


@dataclass(frozen=True)
class Outs:
    out: torch.Tensor
    d: torch.Tensor


# Of a few frequencies some stay, some are in between, and some are divided.
STRETCHED = LLAMA_3_1.model_copy(update={"original_max_position_embeddings": 64})


def rotation(tokens, heads, head_dim, dtype, *, normed, scaling=None):
    """Heads that are columns of a wider tensor; positions that begin within a sequence."""
    wide = randn(tokens, heads + 1, 2 * head_dim, dtype=dtype)
    x, d = wide[:, :heads, :head_dim], randn(tokens, heads, head_dim, dtype=dtype, seed=2)
    rope = Rope(500_000.0, head_dim, seq_len=tokens - 1 or 1, chunk_start=0, scaling=scaling)
    norm = HeadNorm((1 + 0.2 * randn(head_dim, seed=1)).to(dtype), EPS) if normed else None
    return x, d, rope, norm


@DTYPE
@pytest.mark.parametrize("sizes", [(1, 1, 2), (4, 3, 10), (11, 5, 34)], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("angles", ["default", "llama3", "unequal lengths"])
def test_head_norm_and_rope(triton_device, dtype, sizes, normed, angles):
    scaling = STRETCHED if angles == "llama3" else None
    x, d, rope, norm = rotation(*sizes, dtype, normed=normed, scaling=scaling)
    out, backward, positions = torch.full_like(d, float("nan")), None, None
    if angles == "unequal lengths":
        half = sizes[0] // 2
        positions = sequences_tensor((*(half * [1]), sizes[0] - half), half + 1)[half + 2 :]
    if norm is not None:
        d_weight = VectorGradient(randn(sizes[2], dtype=dtype, seed=6), "update")
        backward = HeadNormBackward(norm, x, d_weight)

    def call(ops, workspace, x, outs, norm, backward, positions):  # noqa: PLR0913
        of_chunk = replace(rope, positions=positions)
        ops.write_rotated(x, norm, of_chunk, outs.out)
        ops.rotated_backward(outs.d, of_chunk, backward, workspace)

    def results(x, outs, norm, backward, positions):
        found = {"x": x, "out": outs.out, "d": outs.d}
        return found | ({"d_weight": backward.d_weight.tensor} if backward else {})

    assert_twins_agree(
        triton_device, call, x, Outs(out, d), norm, backward, positions, results=results
    )


def test_positions_begin_anew_with_every_sequence():
    starts, positions = sequences_tensor((2, 2, 1, 6), most_sequences=6).split((7, 11))
    assert starts.tolist() == [0, 2, 4, 5, 11, 11, 11]
    assert positions.tolist() == [0, 1, 0, 1, 0, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("start", [0, 100_000, 2**20 - 40])
@pytest.mark.parametrize("vector", ["eager", "triton"])
def test_cosine_and_sine_are_within_3e_7_of_those_in_float64(triton_device, vector, start):
    """A head of ones and then zeros becomes the cosines and the sines."""
    x = torch.cat((torch.ones(40, 1, 64), torch.zeros(40, 1, 64)), -1)
    device = triton_device if vector == "triton" else "cpu"
    found = x.to(device)
    rope = Rope(500_000.0, 128, seq_len=2**20, chunk_start=start)
    vector_ops(vector).write_rotated(found, None, rope, found)
    positions = start + torch.arange(40, dtype=torch.float64)
    angles = positions[:, None] * 500_000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    exact = torch.cat((angles.cos(), angles.sin()), -1)
    assert (found.cpu()[:, 0].double() - exact).abs().max() <= 3e-7
