import pytest
import torch

from tests.executor.kernels.driver import buffer, run
from twinstream.models.kernel_costs.scratch_sizes import embed_block_columns

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def attributes(dtype, tokens, d_model, vocab):
    return {"d_model": d_model, "vocab_size": vocab, "dtype": dtype, "num_tokens": tokens}


def ids_and_labels(ids):
    return torch.stack((ids, torch.full_like(ids, 10**6))).to(torch.int32).view(-1)


def random_case(dtype, tokens, d_model, vocab, seed=0):
    """Half of the tokens have one id, as the padding or the newline of a real batch has."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.5] = vocab // 2
    d_hidden = torch.randn(tokens, d_model, generator=generator).to(DTYPES[dtype])
    return ids, d_hidden


def backward(ids, d_hidden, vocab, gradients, mode):
    (tokens, d_model), dtype = d_hidden.shape, str(d_hidden.dtype).removeprefix("torch.")
    operands = {
        "tokens": (ids_and_labels(ids).view(torch.uint8), "read"),
        "d_hidden": (d_hidden.contiguous().view(-1).view(torch.uint8), "read"),
        "gradients": (gradients, mode),
    }
    run("embed_backward", attributes(dtype, tokens, d_model, vocab), operands)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_takes_rows(dtype):
    ids, _ = random_case(dtype, 19, 10, 7)
    weight = torch.randn(7, 10, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    output = buffer(19 * 10 * weight.itemsize)
    operands = {
        "parameters": (weight.view(-1).view(torch.uint8), "read"),
        "tokens": (ids_and_labels(ids).view(torch.uint8), "read"),
        "output": (output, "write"),
    }
    run("embed_forward", attributes(dtype, 19, 10, 7), operands)
    assert torch.equal(output.view(DTYPES[dtype]).view(19, 10), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "d_model", "vocab"), [(1, 6, 3), (61, 10, 7), (500, 3, 1000)])
def test_backward_sums_in_float32_and_rounds_once_per_call(dtype, tokens, d_model, vocab):
    ids, d_hidden = random_case(dtype, tokens, d_model, vocab)
    padded = buffer(vocab * d_model * d_hidden.itemsize + 100)
    backward(ids, d_hidden, vocab, padded, "write")
    actual = padded[:-100].view(d_hidden.dtype).view(vocab, d_model)
    sums = torch.zeros(vocab, d_model, dtype=torch.float64)
    sums.index_add_(0, ids, d_hidden.double())
    half_ulp = 2.0**-8 if dtype == "bfloat16" else 1e-6
    assert ((actual - sums).abs() <= half_ulp * sums.abs() + 1e-5).all()
    assert not padded[-100:].any()

    before = actual.double().clone()
    backward(ids, d_hidden, vocab, padded, "update")
    assert ((actual - before - sums).abs() <= half_ulp * (before + sums).abs() + 1e-5).all()


def test_rows_of_absent_ids_keep_their_bits():
    gradients = torch.full((9, 4), -0.0)
    backward(
        torch.tensor([3, 3, 5]), torch.ones(3, 4), 9, gradients.view(-1).view(torch.uint8), "update"
    )
    assert gradients[:, 0].tolist() == [0, 0, 0, 2, 0, 1, 0, 0, 0]
    assert gradients.signbit()[:, 0].tolist() == [i not in (3, 5) for i in range(9)]


def test_more_columns_than_a_block_holds():
    tokens, d_model, vocab = 2**16, 70, 50
    assert embed_block_columns(tokens, d_model) == 64
    ids, d_hidden = random_case("float32", tokens, d_model, vocab)
    gradients = buffer(vocab * d_model * 4)
    backward(ids, d_hidden, vocab, gradients, "write")
    expected = torch.zeros(vocab, d_model, dtype=torch.float64)
    expected.index_add_(0, ids, d_hidden.double())
    actual = gradients.view(torch.float32).view(vocab, d_model)
    assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()
