"""Eager attention against a naive oracle in float64."""

import pytest
import torch

from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.attention.tiles import Sequence
from twinstream.executor.kernels.workspace import Workspace

# Sequences, queries, keys, heads, key heads, head_dim. Tiles are 128 queries by 256 keys.
SHAPES = [
    (2, 5, 5, 4, 2, 8),
    (1, 7, 19, 4, 1, 6),
    (3, 1, 4, 2, 2, 4),
    (1, 300, 300, 2, 2, 4),
    (1, 130, 700, 6, 2, 10),
    (1, 1, 513, 4, 4, 4),
    (2, 257, 257, 2, 1, 6),
]
# float32: rounding of sums over up to 700 keys. bf16: probabilities, score gradients and results
# are rounded to 2**-9 relative, and score gradients are differences, one term of which comes from
# the rounded output. The bound is on the largest element of each tensor.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def oracle(q, k, v, scale):
    """Bottom-right causal attention, K and V repeated; out [B, S, H, D] and lse [B, H, S]."""
    num_queries, num_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bchd->bhsc", q, k) * scale
    hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    scores = scores.masked_fill(~hidden, float("-inf"))
    out = torch.einsum("bhsc,bchd->bshd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1)


def random_inputs(shape, dtype):
    num_sequences, num_queries, num_keys, num_heads, num_key_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(num_sequences, num_queries, num_heads, head_dim, generator=generator)
    kv = torch.randn(num_sequences, num_keys, 2, num_key_heads, head_dim, generator=generator)
    d_out = torch.randn(q.shape, generator=generator)
    return (3 * q).to(dtype), kv.to(dtype), d_out.to(dtype)


def workspace():
    return Workspace(torch.full((2**25,), 0xFF, dtype=torch.uint8))


def forward(q, kv, scale):
    inputs = AttentionInputs(q, kv[:, :, 0], kv[:, :, 1], scale)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"))
    result = AttentionResult(torch.full_like(q, float("nan")), lse)
    attention_implementation("eager").forward(inputs, result, workspace())
    return inputs, result


def assert_close(actual, expected, tolerance):
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_attention_agrees_with_the_oracle(shape, dtype, accumulate):
    q, kv, d_out = random_inputs(shape, dtype)
    scale = shape[-1] ** -0.5
    q64, kv64 = q.double().requires_grad_(), kv.double().requires_grad_()
    out64, lse64 = oracle(q64, kv64[:, :, 0], kv64[:, :, 1], scale)
    out64.backward(d_out.double())

    inputs, result = forward(q, kv, scale)
    d_q = torch.full_like(q, float("nan"))
    d_kv = torch.ones_like(kv, dtype=torch.float32) if accumulate else torch.full_like(kv, 9e9)
    attention_implementation("eager").backward(
        inputs, result, AttentionGradients(d_out, d_q, d_kv, accumulate), workspace()
    )

    tolerance = TOLERANCES[dtype]
    assert_close(result.out, out64, tolerance)
    assert_close(result.lse, lse64, 1e-5)
    assert_close(d_q, q64.grad, tolerance)
    assert_close(d_kv - 1 if accumulate else d_kv, kv64.grad, tolerance)


def test_large_scores_do_not_overflow():
    q, kv, _ = random_inputs((1, 9, 300, 2, 1, 4), torch.float32)
    _, result = forward(1e4 * q, kv, 1.0)
    expected, lse = oracle(1e4 * q.double(), kv[:, :, 0].double(), kv[:, :, 1].double(), 1.0)
    assert_close(result.out, expected, 1e-4)
    assert_close(result.lse, lse, 1e-5)


def test_a_packed_sequence_does_not_see_its_neighbour():
    q, kv, _ = random_inputs((2, 6, 6, 2, 1, 4), torch.float32)
    both = forward(q, kv, 1.0)[1]
    alone = forward(q[1:], kv[1:], 1.0)[1]
    assert torch.equal(both.out[1:], alone.out)


def test_tiles_of_keys_that_no_query_sees_are_skipped():
    q, kv, _ = random_inputs((1, 1000, 1100, 2, 1, 4), torch.float32)
    sequence = Sequence(q[0], kv[0, :, 0], kv[0, :, 1], 1.0)
    first, *_, last = sequence.query_tiles()
    assert [(keys.start, keys.stop) for keys in sequence.key_tiles(first)] == [(0, 228)]
    assert [keys.stop for keys in sequence.key_tiles(last)] == [256, 512, 768, 1024, 1100]
