"""How the libraries that need a GPU are called, shown on stand-ins (see fakes.py)."""

from types import ModuleType

import pytest
import torch

from tests.executor.attention import cases, fakes
from tests.executor.attention.cases import PACKED, SLICED, TOLERANCES, UNEQUAL

LIBRARIES = ("sdpa_flash", "sdpa_cudnn", "flash2", "flash3", "flash4")


@pytest.fixture
def seen(monkeypatch):
    """All stand-ins in place; what torch's own operators were called with."""
    fakes.install(monkeypatch, fakes.flash2_module())
    fakes.install(monkeypatch, fakes.flash4_module())
    fakes.install(monkeypatch, ModuleType("flash_attn_3._C"))
    calls: list[dict] = []
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
    if name == "sdpa_cudnn" and shape.most_packed and 1 not in data.lengths:
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


def test_torchs_flash_backward_runs_in_deterministic_mode_and_leaves_it(seen):
    assert torch.utils.deterministic.fill_uninitialized_memory
    shape = cases.shape(*PACKED[0])
    cases.call("sdpa_flash", shape, cases.random_data(shape))
    forward, backward = seen
    assert not forward["deterministic"]
    assert backward["deterministic"] and not backward["fills"]
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory
