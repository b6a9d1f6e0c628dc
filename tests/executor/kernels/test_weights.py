import pytest
import torch

from tests.executor.kernels.families import FAMILIES, hf_model, tiny_spec
from tests.helpers.hf_weights import (
    flat_layouts,
    pack_hf_state,
    unpack_hf_state,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_survive_the_way_there_and_back(family, dtype):
    spec = tiny_spec(family, dtype)
    model = hf_model(spec)
    flats = pack_hf_state(spec, model.state_dict())
    assert {name: flat.numel() for name, flat in flats.items()} == {
        name: layout.size_bytes for name, layout in flat_layouts(spec).items()
    }
    weights = unpack_hf_state(spec, flats)
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name].float(), value)


def test_rows_of_a_projection_are_q_then_k_then_v():
    spec = tiny_spec("qwen2")
    state = hf_model(spec).state_dict()
    tensor = flat_layouts(spec)["layer.1"].tensor("qkv_proj")
    flat = pack_hf_state(spec, state)["layer.1"]
    rows = flat[tensor.offset_bytes :][: tensor.size_bytes].view(torch.float32).view(tensor.shape)
    names = [f"model.layers.1.self_attn.{which}_proj.weight" for which in "qkv"]
    assert torch.equal(rows, torch.cat([state[name] for name in names]))
