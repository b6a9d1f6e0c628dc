"""How the libraries that need a GPU are called, shown on stand-ins (see fakes.py)."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.executor.attention import cases, fakes
from tests.executor.attention.cases import PACKED, SLICED, TOLERANCES, UNEQUAL
from tests.executor.attention.fake_cudnn import cudnn_module
from twinstream.executor.kernels.attention import registry
from twinstream.executor.kernels.attention.cudnn_frontend import CudnnFrontend, CudnnGraphError
from twinstream.executor.kernels.attention.implementation import Starts
from twinstream.executor.kernels.attention.query_slices import CudnnSliced
from twinstream.executor.kernels.operand import Pack
from twinstream.models.kernel_costs import attention_shape

LIBRARIES = (
    "sdpa_flash",
    "sdpa_cudnn",
    "flash2",
    "flash3",
    "flash4",
    "cudnn_frontend",
    "cudnn_sliced",
)


@pytest.fixture
def seen(monkeypatch):
    """All stand-ins in place; what torch's own operators were called with."""
    fakes.install(monkeypatch, fakes.flash2_module())
    fakes.install(monkeypatch, fakes.flash4_module())
    fakes.install(monkeypatch, ModuleType("flash_attn_3._C"))
    calls: list[dict] = []
    fakes.install(monkeypatch, cudnn_module(calls))
    fresh = {"cudnn_frontend": CudnnFrontend(), "cudnn_sliced": CudnnSliced()}
    registered = registry._IMPLEMENTATIONS | fresh  # without a graph built before
    monkeypatch.setattr(registry, "_IMPLEMENTATIONS", registered)
    with fakes.torch_cuda_kernels(calls), fakes.flash3_operators():
        yield calls


@pytest.mark.parametrize("sizes", PACKED + SLICED + UNEQUAL, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_keeps_its_promises_gives_what_the_oracle_gives(seen, name, dtype, sizes):
    """In exactly the scratch declared; of unequal lengths the oracle goes sequence by sequence."""
    shape = cases.shape_of(sizes, dtype)
    data = cases.random_data(shape)
    found = cases.call(name, shape, data)
    cases.assert_close(found, cases.oracle(data), TOLERANCES[dtype])
    declared = cases.declared_bytes(name, shape)
    if "cudnn" in name and shape.most_packed and 1 not in data.lengths:
        assert found.scratch_bytes <= declared  # any of them might be of one token
    else:
        assert found.scratch_bytes == declared


def test_cudnn_is_called_for_each_of_unequal_lengths_but_those_of_one_token(seen):
    shape = cases.unequal((5, 1, 7), 4, 2, 8)
    cases.call("sdpa_cudnn", shape, cases.random_data(shape))
    assert [(call["causal"], call["keys"]) for call in seen] == 2 * [(True, 7), (True, 5)]


def test_cudnn_computes_the_past_without_a_mask_and_the_slice_with_a_causal_one(seen):
    shape = cases.shape(1, 64, 192, 4, 2, 8)
    cases.call("sdpa_cudnn", shape, cases.random_data(shape))
    calls = [(call["name"], call["causal"], call["keys"]) for call in seen]
    assert calls == [
        ("_cudnn_forward", False, 128),
        ("_cudnn_forward", True, 64),
        ("_cudnn_backward", False, 128),
        ("_cudnn_backward", True, 64),
    ]


@pytest.mark.parametrize("name", ["sdpa_flash", "flash2"])
def test_flash_2_is_told_little_more_than_the_sequences_that_there_are(seen, name, monkeypatch):
    shape = cases.unequal((300, 1, 150, 3), 4, 2, 8)
    data = cases.random_data(shape)
    lengths = data.starts.cu_seqlens.diff().tolist()
    roomy = Starts(Starts.cumulative(lengths, 900), 8192, lambda: Pack(max(lengths), len(lengths)))
    told: list[tuple[int, int]] = []
    rows = fakes._rows

    def spied(q, starts, longest):
        told.append((starts.numel() - 1, longest))
        return rows(q, starts, longest)

    monkeypatch.setattr(fakes, "_rows", spied)
    found = cases.call(name, shape, replace(data, starts=roomy))
    cases.assert_close(found, cases.oracle(data), TOLERANCES["float32"])
    assert set(told) == {(64, 512)}, "192 / 4 heads are 48 at least, and 300 tokens"


def test_torchs_flash_backward_runs_in_deterministic_mode_and_leaves_it(seen):
    assert torch.utils.deterministic.fill_uninitialized_memory
    shape = cases.shape(*PACKED[0])
    cases.call("sdpa_flash", shape, cases.random_data(shape))
    forward, backward = seen
    assert not forward["deterministic"]
    assert backward["deterministic"] and not backward["fills"]
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory


def names_of(seen, name):
    return [call for call in seen if call["name"] == name]


def test_cudnns_graphs_are_built_once_for_sizes_and_strides(seen):
    shape = cases.shape(2, 64, 64, 4, 2, 16, "bfloat16")
    data = cases.random_data(shape)
    cases.call("cudnn_frontend", shape, data)
    again = cases.call("cudnn_frontend", shape, data)
    assert names_of(seen, "build") == [
        {"name": "build", "of": n} for n in ("sdpa", "sdpa_backward")
    ]
    assert len(seen) == 2 + 2 * 2
    cases.assert_close(again, cases.oracle(data), TOLERANCES["bfloat16"])


@pytest.mark.parametrize(
    ("most_bytes", "calls"), [(0, 4), (2 * 64 * 64 * 2 * 2 * 2, 2), (2**30, 1)]
)
@pytest.mark.parametrize("sequences", [1, 2])
def test_cudnns_backward_is_called_for_as_many_key_heads_as_its_workspace_allows(
    seen, monkeypatch, most_bytes, calls, sequences
):
    most_bytes = most_bytes * sequences // 2
    monkeypatch.setattr(attention_shape, "_MOST_PROBABILITIES_BYTES", most_bytes)
    shape = cases.shape(sequences, 64, 64, 8, 4, 16, "bfloat16")
    data = cases.random_data(shape)
    found = cases.call("cudnn_frontend", shape, data)
    cases.assert_close(found, cases.oracle(data), TOLERANCES["bfloat16"])
    assert [call["heads"] for call in names_of(seen, "sdpa")] == [8]
    assert [call["heads"] for call in names_of(seen, "sdpa_backward")] == calls * [8 // calls]


def test_sizes_that_cudnn_has_no_kernel_for_are_a_sentence(monkeypatch):
    fakes.install(monkeypatch, cudnn_module([], refuses="No engine.\nlog"))
    shape = cases.shape(1, 64, 64, 4, 2, 16, "bfloat16")
    registered = {**registry._IMPLEMENTATIONS, "cudnn_frontend": CudnnFrontend()}
    monkeypatch.setattr(registry, "_IMPLEMENTATIONS", registered)
    told = r"cuDNN 91801 has no kernel for sdpa of q \(1, 64, 4, 16\).*: No engine\.; plan with"
    with pytest.raises(CudnnGraphError, match=told):
        cases.call("cudnn_frontend", shape, cases.random_data(shape))
