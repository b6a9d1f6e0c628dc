"""Triton's SwiGLU, cross entropy and sums against their eager twins, over odd shapes."""

import importlib
from dataclasses import dataclass, replace

import pytest
import torch

from tests.executor.kernels.twins import DTYPES, TOLERANCES, assert_twins_agree, randn
from twinstream.executor.kernels.vector.vector_ops import LogitRows, SortedTokens, VectorGradient
from twinstream.executor.kernels.workspace import Workspace

pytest.importorskip("triton")
triton_cross_entropy = importlib.import_module(
    "twinstream.executor.kernels.triton_kernels.cross_entropy"
)

DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@dataclass(frozen=True)
class Products:
    first: torch.Tensor
    again: torch.Tensor


@DTYPE
@pytest.mark.parametrize(("tokens", "d_ff"), [(1, 1), (3, 37), (2, 2050)])
def test_swiglu(triton_device, dtype, tokens, d_ff):
    gate_up, d = 3 * randn(tokens, 2 * d_ff), randn(tokens, 2 * d_ff, dtype=dtype, seed=1)
    product = torch.full((tokens, d_ff + 2), float("nan")).to(dtype)[:, :d_ff]

    again = torch.full((tokens, d_ff), float("nan")).to(dtype)

    def call(ops, workspace, gate_up, d, products):
        ops.write_swiglu(gate_up, products.first)
        ops.swiglu_backward(gate_up, d, products.again)

    assert_twins_agree(
        triton_device, call, gate_up.to(dtype), d, Products(product, again),
        results=lambda gate_up, d, products: {"d": d} | vars(products),
    )  # fmt: skip


@DTYPE
@pytest.mark.parametrize("mode", ["write", "update"])
@pytest.mark.parametrize("shape", [(1, 1), (6, 515), (270, 3)], ids=str)
def test_column_sums(triton_device, dtype, mode, shape):
    gradient = VectorGradient(randn(shape[1], dtype=dtype, seed=1), mode)

    def call(ops, workspace, x, gradient):
        ops.add_column_sums(x, gradient, workspace)

    assert_twins_agree(
        triton_device, call, randn(*shape, dtype=dtype), gradient,
        results=lambda x, gradient: {"sums": gradient.tensor},
    )  # fmt: skip


def logit_rows(num_rows, vocab_size, dtype, scale=1.0):
    labels = torch.arange(num_rows, dtype=torch.int32) * 7 % vocab_size
    labels[num_rows // 2] = -100
    logits = scale * randn(num_rows, vocab_size)
    return LogitRows(
        logits.to(dtype), labels, torch.full((num_rows,), float("nan")), torch.tensor([0.125])
    )


def call_cross_entropy(ops, workspace, rows):
    ops.cross_entropy(rows, workspace)


def loss_results(rows):
    return {"losses": rows.losses, "d_logits": rows.logits}


@DTYPE
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(2, 1), (5, 97), (2, 1025)])
def test_cross_entropy(triton_device, dtype, num_rows, vocab_size):
    rows = logit_rows(num_rows, vocab_size, dtype)
    assert_twins_agree(triton_device, call_cross_entropy, rows, results=loss_results)


@DTYPE
def test_cross_entropy_with_a_scale_of_each_row(triton_device, dtype):
    rows = logit_rows(5, 97, dtype)
    rows = replace(rows, loss_scale=torch.linspace(-0.5, 0.5, 5))
    assert_twins_agree(triton_device, call_cross_entropy, rows, results=loss_results)


@DTYPE
def test_cross_entropy_of_several_blocks(triton_device, dtype, monkeypatch):
    """The maximum lies in the last block of the one row, in the first of the other.

    Programs have several rows each, and some rows are far below zero.
    """
    monkeypatch.setattr(triton_cross_entropy, "_BLOCK", 32)
    monkeypatch.setattr(triton_cross_entropy, "_PROGRAMS", 2)
    rows = logit_rows(5, 101, dtype)
    rows.logits[3] -= 1e4
    rows.logits[0, 100], rows.logits[2, 1] = 20.0, 30.0
    assert_twins_agree(triton_device, call_cross_entropy, rows, results=loss_results)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """2**31 elements lie before the last rows; a 32-bit offset would wrap."""
    vocab_size = 2**17
    num_rows = 2**31 // vocab_size + 8
    if torch.cuda.get_device_properties(0).total_memory < 12 * 2**30:
        pytest.skip("needs 12 GiB of device memory")
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    logits[-8:] = logit_rows(8, vocab_size, torch.bfloat16).logits.cuda()
    one = torch.ones(1, device="cuda")
    few = LogitRows(logits[-8:].clone(), torch.arange(8, dtype=torch.int32, device="cuda"),
                    torch.empty(8, device="cuda"), one)  # fmt: skip
    labels = torch.arange(num_rows, dtype=torch.int32, device="cuda") - (num_rows - 8)
    losses = torch.empty(num_rows, device="cuda")
    none = Workspace(torch.empty(0, dtype=torch.uint8, device="cuda"))
    triton_cross_entropy.cross_entropy(few, none)
    triton_cross_entropy.cross_entropy(LogitRows(logits, labels, losses, one), none)
    assert torch.equal(logits[-8:], few.logits)
    assert torch.equal(losses[-8:], few.losses)


@DTYPE
@pytest.mark.parametrize("gradient_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("tokens", "d_model"), [(1, 3), (23, 10), (4, 520)])
def test_token_gradients(triton_device, dtype, gradient_dtype, tokens, d_model):
    """Half of the tokens have one id."""
    ids = torch.arange(tokens) % 7
    ids[::2] = 3
    ids, order = torch.sort(ids, stable=True)
    last = torch.searchsorted(ids, ids, right=True) - 1
    gradient = randn(7, d_model, dtype=gradient_dtype, seed=1)

    def call(ops, workspace, d_hidden, tokens, gradient):
        ops.add_token_gradients(d_hidden, tokens, gradient, workspace)

    assert_twins_agree(
        triton_device, call, randn(tokens, d_model, dtype=dtype), SortedTokens(ids, order, last),
        gradient, results=lambda d_hidden, tokens, gradient: {"gradient": gradient},
        tolerances=TOLERANCES,
    )  # fmt: skip
