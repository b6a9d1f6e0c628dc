"""Hugging Face folders, as transformers saves them, into flat tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import (
    FAMILIES,
    SEQ_LEN,
    hf_model,
    hf_step,
    loss_scale,
    random_tokens,
    tiny_spec,
)
from tests.executor.weights.small_models import MODELS, random_model, read_flats, save
from tests.helpers.hf_weights import flat_layouts, pack_hf_state, unpack_hf_state
from twinstream.executor.weights import hf_folder
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.models.decoders.spec import ModelSpec


@pytest.fixture(scope="module")
def models():
    return {name: random_model(name) for name in MODELS}


def in_layers(flats):
    """Under the names of the tests' own packing."""
    ends = ("embedding", "head")
    return {name if name in ends else f"layer.{name}": flat for name, flat in flats.items()}


def assert_same(flats, expected):
    assert flats.keys() == expected.keys()
    for name, flat in flats.items():
        assert torch.equal(flat, expected[name]), name


@pytest.mark.parametrize("max_shard_size", ["1GB", "30KB"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_arrives_where_the_kernels_read_it(models, name, max_shard_size, tmp_path):
    spec = save(models[name], tmp_path, max_shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or max_shard_size == "30KB"
    flats = in_layers(read_flats(HfFolder.open(tmp_path, spec)))
    state = models[name].state_dict()
    assert_same(flats, pack_hf_state(spec, state))
    for hf_name, tensor in unpack_hf_state(spec, flats).items():
        assert torch.equal(tensor, state[hf_name]), hf_name


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_dtypes_are_converted_rounded_to_nearest(
    models, stored, dtype, tmp_path, monkeypatch
):
    monkeypatch.setattr(hf_folder, "_BLOCK_ELEMENTS", 100)  # blocks end within tensors
    spec = save(models["llama"], tmp_path).model_copy(update={"dtype": dtype})
    state = {name: tensor.to(stored) for name, tensor in models["llama"].state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    flats = in_layers(read_flats(HfFolder.open(tmp_path, spec)))
    assert_same(flats, pack_hf_state(spec, state))


def test_padding_is_zeroed(models, tmp_path):
    spec = save(models["qwen3"], tmp_path)
    flats = in_layers(read_flats(HfFolder.open(tmp_path, spec)))
    num_padding = 0
    for name, layout in flat_layouts(spec).items():
        padding = torch.ones(layout.size_bytes, dtype=torch.bool)
        for inner in layout.tensors:
            padding[inner.offset_bytes : inner.offset_bytes + inner.size_bytes] = False
        num_padding += int(padding.sum())
        assert not flats[name][padding].any()
    assert num_padding > 0


def test_a_group_can_be_read_without_the_others(models, tmp_path):
    spec = save(models["llama"], tmp_path, "30KB")
    folder = HfFolder.open(tmp_path, spec)
    flat = torch.empty(flat_layouts(spec)["head"].size_bytes, dtype=torch.uint8)
    files = {weight.file for weight in folder.stored.values()}
    used = {folder.stored[name].file for name in ("model.norm.weight", "lm_head.weight")}
    for file in files - used:
        file.unlink()
    folder.read_group("head", flat)
    assert torch.equal(flat, pack_hf_state(spec, models["llama"].state_dict())["head"])


def test_an_equal_lm_head_of_tied_embeddings_and_old_buffers_are_ignored(models, tmp_path):
    spec = save(models["llama_tied"], tmp_path)
    path = tmp_path / "model.safetensors"
    more = {
        "lm_head.weight": load_file(path)["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6, dtype=torch.float64),
    }
    save_file(load_file(path) | more, path)
    flats = in_layers(read_flats(HfFolder.open(tmp_path, spec)))
    assert_same(flats, pack_hf_state(spec, models["llama_tied"].state_dict()))


def test_an_lm_head_that_is_not_the_tied_embedding_is_refused(models, tmp_path):
    spec = save(models["llama_tied"], tmp_path)
    path = tmp_path / "model.safetensors"
    head = load_file(path)["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file(load_file(path) | {"lm_head.weight": head}, path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)  # which does not tie them then
    assert torch.equal(loaded.lm_head.weight, head)
    says = r'lm_head.weight with other values .*write "tie_word_embeddings": false'
    with pytest.raises(WeightsError, match=says):
        HfFolder.open(tmp_path, spec)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    HfFolder.open(tmp_path, ModelSpec.from_hf_config(tmp_path))


def test_one_file_wins_over_an_index_as_in_transformers(models, tmp_path):
    spec = save(models["llama"], tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b"}}))
    assert HfFolder.open(str(tmp_path), spec).stored["model.norm.weight"].shape == (48,)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_what_is_read_is_that_of_transformers(family, tmp_path):
    model = hf_model(tiny_spec(family))
    spec = save(model, tmp_path)
    parameters = in_layers(read_flats(HfFolder.open(tmp_path, spec)))
    tokens = random_tokens(spec)
    step = Step(spec, parameters, tokens, SEQ_LEN, SEQ_LEN, loss_scale(tokens))
    expected = hf_step(model, tokens).loss
    assert abs(step.run().item() - expected) <= 1e-5 * expected
