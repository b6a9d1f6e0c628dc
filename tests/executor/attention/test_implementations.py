"""Every attention implementation that can run here, against an oracle in float64."""

import pytest
import torch

from tests.executor.attention import cases
from tests.executor.attention.cases import PACKED, SLICED, TOLERANCES, UNEQUAL
from twinstream.executor.kernels.attention import returning
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.models.kernel_costs import attention_memory

ON_CPU = ("eager", "sdpa_cpu")
ALL = PACKED + SLICED + UNEQUAL


@pytest.mark.parametrize("sizes", ALL, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ON_CPU)
def test_attention_agrees_with_the_oracle_from_buffers_of_nan(name, dtype, sizes):
    shape = cases.shape_of(sizes, dtype)
    data = cases.random_data(shape)
    found = cases.call(name, shape, data)
    cases.assert_close(found, cases.oracle(data), TOLERANCES[dtype])
    assert found.scratch_bytes == cases.declared_bytes(name, shape)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_packed_sequence_has_the_bits_it_has_by_itself(name):
    data = cases.random_data(cases.unequal((5, 1, 70), 4, 2, 8))
    found = cases.call(name, cases.unequal((5, 1, 70), 4, 2, 8), data)
    alone = [cases.call(name, cases.shape(1, n, n, 4, 2, 8), one)
             for n, one in zip(data.lengths, data.each(), strict=True)]  # fmt: skip
    expected = cases.side_by_side(alone)
    for field in ("out", "lse", "d_q", "d_kv"):
        assert torch.equal(getattr(found, field), getattr(expected, field))


@pytest.mark.parametrize("name", ON_CPU)
def test_with_fewer_queries_than_keys_the_queries_are_the_last_positions(name):
    """Queries of a slice see what the same rows of the whole sequence see."""
    whole = cases.shape(1, 12, 12, 4, 2, 8)
    data = cases.random_data(whole)
    last = cases.Data(data.q[:, 7:], data.kv, data.d_out[:, 7:], data.scale)
    found = cases.call(name, cases.shape(1, 5, 12, 4, 2, 8), last)
    expected = cases.call(name, whole, data)
    torch.testing.assert_close(found.out, expected.out[:, 7:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.lse, expected.lse[:, :, 7:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [PACKED[0], SLICED[0], SLICED[3]])
@pytest.mark.parametrize("name", ON_CPU)
def test_what_says_it_is_deterministic_has_the_same_bits_from_run_to_run(name, sizes):
    assert attention_implementation(name).deterministic
    shape = cases.shape(*sizes, "bfloat16")
    data = cases.random_data(shape)
    first, second = (cases.call(name, shape, data) for _ in range(2))
    for field in ("out", "lse", "d_q", "d_kv"):
        assert torch.equal(getattr(first, field), getattr(second, field))


def test_parts_merged_block_by_block_are_those_merged_at_once(monkeypatch):
    shape = cases.shape(1, 37, 90, 4, 2, 8)
    data = cases.random_data(shape)
    at_once = cases.call("sdpa_cpu", shape, data)
    monkeypatch.setattr(returning, "MERGE_BLOCK_ELEMENTS", 5 * 32)
    monkeypatch.setattr(attention_memory, "MERGE_BLOCK_ELEMENTS", 5 * 32)
    by_block = cases.call("sdpa_cpu", shape, data)
    assert by_block.scratch_bytes[0] < at_once.scratch_bytes[0]
    assert torch.equal(by_block.out, at_once.out)


def test_large_scores_do_not_overflow():
    shape = cases.shape(1, 9, 300, 2, 1, 8)
    data = cases.random_data(shape)
    data.q.mul_(1e4)
    found, expected = cases.call("eager", shape, data), cases.oracle(data)
    torch.testing.assert_close(found.out.double(), expected.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.lse.double(), expected.lse, rtol=1e-5, atol=0.0)


def test_a_part_far_above_the_other_takes_all_of_the_output():
    """Scores of the past reach hundreds: their exponentials alone would overflow."""
    shape = cases.shape(1, 6, 20, 2, 2, 8)
    data = cases.random_data(shape)
    data.kv[:, :14, 0] *= 60.0
    found, expected = cases.call("sdpa_cpu", shape, data), cases.oracle(data)
    assert expected.lse.max() > 100
    torch.testing.assert_close(found.out.double(), expected.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.lse.double(), expected.lse, rtol=1e-6, atol=0.0)
