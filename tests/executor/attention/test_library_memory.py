"""What libraries allocate by themselves: the formulas against what is taken, and by hand."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.executor.attention import cases
from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionResult,
)
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.models.kernel_costs.attention_limits import attention_limits

MIB = 2**20
# Attention of 8B at 8,192 tokens: 32 query heads, 8 key heads of 128.
WHOLE = cases.shape(1, 8192, 8192, 32, 8, 128, "bfloat16")


def peak_bytes(call) -> int:
    """The most that torch's CPU allocator held of what the call allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    held = most = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("dtype", cases.TOLERANCES)
@pytest.mark.parametrize(
    "sizes",
    [(1, 64, 64, 4, 2, 64), (1, 300, 700, 4, 2, 64), (1, 1000, 1500, 4, 4, 32),
     (2, 600, 600, 4, 2, 128), ((300, 5, 900), 4, 2, 64)],
    ids=str,
)  # fmt: skip
def test_the_cpu_kernels_take_at_most_what_is_declared(sizes, dtype):
    """At most, and not less than a third of it: the formula is not just large."""
    shape = cases.shape_of(sizes, dtype)
    data = cases.random_data(shape)
    implementation = attention_implementation("sdpa_cpu")
    lse = torch.empty(shape.num_sequences, shape.num_heads, shape.num_queries)
    result = AttentionResult(torch.empty_like(data.q), lse)
    into = torch.float32 if shape.sliced else data.q.dtype
    gradients = AttentionGradients(
        data.d_out, torch.empty_like(data.q), torch.zeros_like(data.kv, dtype=into), shape.sliced
    )
    scratch = cases.scratch("sdpa_cpu", "forward", shape, data.q.device)
    taken = peak_bytes(lambda: implementation.forward(data.inputs, result, scratch))
    declared = attention_limits("sdpa_cpu").allocates("forward", shape)
    assert declared / 3 <= taken <= declared
    scratch = cases.scratch("sdpa_cpu", "backward", shape, data.q.device)
    taken = peak_bytes(lambda: implementation.backward(data.inputs, result, gradients, scratch))
    declared = attention_limits("sdpa_cpu").allocates("backward", shape)
    assert declared / 3 <= taken <= declared


def test_flash_2_keeps_a_sum_of_dq_for_each_share_of_the_multiprocessors():
    """dO * O a row; 192 / 32 = 6 sums of dQ in float32; dK and dV of 32 heads in bf16."""
    expected = 8192 * 32 * 4 + 6 * 8192 * 32 * 128 * 4 + 2 * 8192 * 32 * 128 * 2
    assert attention_limits("flash2").allocates("backward", WHOLE) == expected
    results = 8192 * 32 * 128 * 2 + 2 * 8192 * 8 * 128 * 2
    assert attention_limits("sdpa_flash").allocates("backward", WHOLE) == expected + results


def test_of_unequal_lengths_flash_2_pads_each_by_a_block():
    """Rows of 1,000 + 24 + 3,000 tokens and 128 more for each of three sequences of 32 heads."""
    shape = cases.unequal((1000, 24, 3000), 32, 8, 128, "bfloat16")
    rows = (4024 + 3 * 128) * 32
    shares = 2  # of 192 multiprocessors, which 96 heads leave idle
    expected = rows * 4 + shares * rows * 128 * 4 + 2 * 4024 * 32 * 128 * 2
    assert attention_limits("flash2").allocates("backward", shape) == expected
    results = 4024 * 32 * 128 * 2 + 2 * 4024 * 8 * 128 * 2
    assert attention_limits("sdpa_flash").allocates("backward", shape) == expected + results
    assert attention_limits("flash2").allocates("forward", shape) == 4024 * 32 * 4 + 512


def test_of_unequal_lengths_flash_4_pads_each_by_a_block_and_one_more():
    shape = cases.unequal((1000, 24, 3000), 32, 8, 128, "bfloat16")
    rows, keys = (4024 + 4 * 128) * 32, 4024 + 4 * 256
    sums = rows * 128 * 4 + 2 * rows * 4 + 2 * keys * 8 * 128 * 4
    found = attention_limits("flash4").allocates("backward", shape)
    assert sums <= found <= sums * 1.02
    assert attention_limits("flash4").allocates("forward", shape) == 0
    many = cases.unequal((*(300 * [1]), 2), 32, 8, 128, "bfloat16")
    assert attention_limits("flash4").allocates("forward", many) > 0


def test_flash_4_keeps_one_sum_of_dq_dk_and_dv_whatever_the_device():
    """Float32 sums of dQ (128 MiB), dK and dV (32 MiB each), two floats a row, and little else."""
    sums = 128 * MIB + 2 * 32 * MIB + 2 * 8192 * 32 * 4
    found = attention_limits("flash4").allocates("backward", WHOLE)
    assert sums <= found <= sums * 1.02
    assert attention_limits("flash4").allocates("forward", WHOLE) == 0


def test_flash_2_splits_the_keys_only_where_queries_are_few():
    """32 heads of 2 blocks of 64 queries do not occupy 192 multiprocessors twice over."""
    few = cases.shape(1, 128, 8192, 32, 8, 128, "bfloat16")
    lse = 128 * 32 * 4
    assert attention_limits("flash2").allocates("forward", WHOLE) == 8192 * 32 * 4 + 512
    split = attention_limits("flash2").allocates("forward", few)
    assert split == lse + 512 + 64 * (lse + 128 * 32 * 128 * 4)


def test_cudnn_keeps_the_probabilities_of_one_key_head_at_a_time():
    """Of four query heads in bf16; dO * O a row; dK and dV of each of them; their log-sum-exps."""
    rows = 4 * 8192
    expected = rows * 8192 * 2 + 2 * rows * 4 + 2 * rows * 128 * 2 + rows * 4
    assert attention_limits("cudnn_frontend").allocates("backward", WHOLE) == expected
    assert expected < 0.6 * 2**30
    short = cases.shape(16, 1024, 1024, 32, 8, 128, "bfloat16")  # four key heads at a time
    rows = 16 * 16 * 1024
    expected = rows * 1024 * 2 + 2 * rows * 4 + 2 * rows * 128 * 2 + rows * 4
    assert attention_limits("cudnn_frontend").allocates("backward", short) == expected
