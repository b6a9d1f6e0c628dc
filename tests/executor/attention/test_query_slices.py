"""Backward over slices of queries: what is called, in which order it is summed, how far off it is.

cuDNN is not here, so its slices are shown of eager attention, whose calls are the same.
"""

from dataclasses import replace

import pytest
import torch

from tests.executor.attention import cases
from tests.executor.attention.test_library_calls import names_of, seen  # noqa: F401 - a fixture
from twinstream.executor.kernels.attention import registry
from twinstream.executor.kernels.attention.eager import EagerAttention
from twinstream.executor.kernels.attention.implementation import (
    AttentionGradients,
    AttentionInputs,
    AttentionResult,
)
from twinstream.executor.kernels.attention.query_slices import CudnnSliced, SlicedQueries
from twinstream.models.kernel_costs import attention_memory, attention_shape
from twinstream.models.kernel_costs.attention_libraries import ATTENTIONS, EagerFacts
from twinstream.models.kernel_costs.attention_shape import query_slices

SIZES = [
    (1, 64, 64, 4, 2, 8),
    (2, 70, 70, 4, 4, 16),
    (1, 48, 96, 4, 1, 64),
    (1, 96, 96, 2, 2, 128),
    (1, 33, 130, 2, 1, 8),
]


class EagerSliced(SlicedQueries):
    name = "cudnn_sliced"
    kind = EagerAttention


class EagerSlicedMemory(EagerFacts):
    """Sums of dK and dV, and the most that eager attention takes of a slice."""

    def backward_scratch(self, shape):
        slices = shape.slices()
        if shape.most_packed or len(slices) == 1:
            return super().backward_scratch(shape)
        sums = 0 if shape.sliced else attention_memory.aligned_float32(shape.num_kv_elements)
        return sums + max(map(super().backward_scratch, slices))


@pytest.fixture
def eager(monkeypatch):
    """Slices of 16 queries, of eager attention, by the name of cuDNN's."""
    monkeypatch.setattr(attention_shape, "_SLICE_QUERIES", 16)
    known = registry._IMPLEMENTATIONS | {"cudnn_sliced": EagerSliced()}
    monkeypatch.setattr(registry, "_IMPLEMENTATIONS", known)
    monkeypatch.setitem(ATTENTIONS, "cudnn_sliced", EagerSlicedMemory())


def by_hand(data, shape, found):
    """Gradients of calls of eager attention for each slice of the whole's output, in turn."""
    num_queries, num_keys = data.q.shape[1], data.kv.shape[1]
    d_q, d_kv = torch.empty_like(data.q), torch.zeros(data.kv.shape, dtype=torch.float32)
    for one in query_slices(num_queries, num_keys):
        start, stop = one.start, one.stop
        end = num_keys - num_queries + stop
        k, v = data.kv[:, :end].unbind(2)
        workspace = cases.scratch("eager", "backward", replace(shape, sliced=True), d_q.device)
        EagerAttention().backward(
            AttentionInputs(data.q[:, start:stop], k, v, data.scale),
            AttentionResult(found.out[:, start:stop], found.lse[:, :, start:stop]),
            AttentionGradients(data.d_out[:, start:stop], d_q[:, start:stop], d_kv[:, :end], True),
            workspace,
        )
    return d_q, d_kv


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", cases.TOLERANCES)
def test_slices_have_the_bits_of_slices_done_by_hand(eager, sizes, dtype):
    shape = cases.shape(*sizes, dtype)
    data = cases.random_data(shape)
    found = cases.call("cudnn_sliced", shape, data, d_kv_before=0.0)
    cases.assert_close(found, cases.oracle(data), cases.TOLERANCES[dtype])
    assert found.scratch_bytes[1] == EagerSlicedMemory().backward_scratch(shape)
    d_q, d_kv = by_hand(data, shape, found)
    assert len(shape.slices()) > 1
    assert torch.equal(found.d_q, d_q)
    assert torch.equal(found.d_kv, d_kv.to(found.d_kv.dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rounding_errors_are_no_more_than_half_as_large_again_as_of_one_call(eager, head_dim):
    shape = cases.shape(1, 256, 256, 4, 2, head_dim, "bfloat16")
    data = cases.random_data(shape)
    assert len(shape.slices()) == 8
    exact = cases.oracle(data)

    def errors(name):
        found = cases.call(name, shape, data)
        pairs = ((found.d_q, exact.d_q), (found.d_kv, exact.d_kv))
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    for sliced, whole in zip(errors("cudnn_sliced"), errors("eager"), strict=True):
        assert sliced <= 1.5 * whole


def test_unequal_lengths_are_called_whole(eager):
    shape = cases.unequal((64, 1, 40), 4, 2, 8)
    data = cases.random_data(shape)
    found, whole = (cases.call(name, shape, data) for name in ("cudnn_sliced", "eager"))
    for field in ("out", "lse", "d_q", "d_kv"):
        assert torch.equal(getattr(found, field), getattr(whole, field))


def test_cudnn_gets_each_slice_with_the_keys_up_to_its_end(seen, monkeypatch):  # noqa: F811
    monkeypatch.setattr(attention_shape, "_SLICE_QUERIES", 16)
    shape = cases.shape(1, 64, 96, 8, 4, 16, "bfloat16")
    data = cases.random_data(shape)
    found = cases.call("cudnn_sliced", shape, data)
    cases.assert_close(found, cases.oracle(data), cases.TOLERANCES["bfloat16"])
    assert [call["keys"] for call in names_of(seen, "sdpa")] == [96]
    assert [call["keys"] for call in names_of(seen, "sdpa_backward")] == [48, 64, 80, 96]
    assert found.scratch_bytes == cases.declared_bytes("cudnn_sliced", shape)
    assert CudnnSliced().deterministic


def test_rectangles_of_slices_are_less_than_the_square():
    for queries, keys, share in ((8192, 8192, 0.5625), (4096, 4096, 0.625), (1024, 1024, 0.75)):
        computed = sum(
            (one.stop - one.start) * (keys - queries + one.stop)
            for one in query_slices(queries, keys)
        )
        assert computed == share * queries * keys
