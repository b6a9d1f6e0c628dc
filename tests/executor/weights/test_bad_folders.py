"""What is wrong with a folder of weights is one message, before anything but headers is read."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.weights.small_models import random_model, save
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_folder import HfFolder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def models():
    return {name: random_model(name) for name in ("llama", "llama_tied")}


@pytest.fixture
def single(models, tmp_path):
    return tmp_path, save(models["llama"], tmp_path)


@pytest.fixture
def sharded(models, tmp_path):
    return tmp_path, save(models["llama"], tmp_path, "30KB")


def refusal(folder, spec):
    with pytest.raises(WeightsError) as caught:
        HfFolder.open(folder, spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_says(message, *parts):
    for part in parts:
        assert part in message, message


def change(folder, **changes):
    """Tensors replaced, added, or (None) removed; dots in names are written as __."""
    changed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    state = load_file(folder / SINGLE) | changed
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, folder / SINGLE)


def test_a_folder_that_is_not_there(single):
    folder, spec = single
    assert_says(refusal(folder / "nope", spec), str(folder / "nope"), "is no folder")


def test_a_name_that_no_folder_can_have(single):
    folder, spec = single
    assert_says(refusal(folder / ("a" * 300), spec), "cannot be read: File name too long")


def test_a_folder_without_weights_says_what_is_there(single):
    folder, spec = single
    (folder / SINGLE).unlink()
    assert_says(refusal(folder, spec), "config.json", SINGLE, INDEX)


def test_pickles_are_refused_with_the_way_out(single):
    folder, spec = single
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    assert_says(refusal(folder, spec), "pytorch_model.bin", "refused", "save_pretrained")


def test_shards_without_an_index(sharded):
    folder, spec = sharded
    (folder / INDEX).unlink()
    assert_says(refusal(folder, spec), INDEX, "model-00001-of-", "more")


def test_an_index_that_is_no_json(sharded):
    folder, spec = sharded
    (folder / INDEX).write_text("{'a'")
    assert_says(refusal(folder, spec), INDEX, "not valid JSON")


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_weight_map(sharded, index):
    folder, spec = sharded
    (folder / INDEX).write_text(json.dumps(index))
    assert_says(refusal(folder, spec), INDEX, "weight_map")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_that_points_out_of_the_folder(sharded, file):
    folder, spec = sharded
    (folder / INDEX).write_text(json.dumps({"weight_map": {Q_PROJ: file}}))
    assert_says(refusal(folder, spec), INDEX, repr(file), Q_PROJ)


@pytest.mark.parametrize("file", ["a" * 300, "a\0b"])
def test_an_index_with_a_name_that_no_file_can_have(sharded, file):
    folder, spec = sharded
    (folder / INDEX).write_text(json.dumps({"weight_map": {Q_PROJ: file}}))
    assert_says(refusal(folder, spec), INDEX, "it needs a file of this folder", Q_PROJ)


def test_a_missing_shard(sharded):
    folder, spec = sharded
    shard = sorted(folder.glob("model-00002-*"))[0]
    shard.unlink()
    assert_says(refusal(folder, spec), shard.name, "is missing")


def test_a_tensor_that_its_shard_lacks(sharded):
    folder, spec = sharded
    shard = json.loads((folder / INDEX).read_text())["weight_map"][Q_PROJ]
    state = load_file(folder / shard)
    del state[Q_PROJ]
    save_file(state, folder / shard)
    assert_says(refusal(folder, spec), shard, f"lacks {Q_PROJ}", INDEX)


def test_a_shard_that_is_cut_off(sharded):
    folder, spec = sharded
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-5])
    size = len(content)
    assert_says(refusal(folder, spec), shard.name, "cut off", f"{size - 5} bytes of the {size}")


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 200])
def test_a_file_that_is_cut_off_within_its_header(single, num_bytes):
    folder, spec = single
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert_says(refusal(folder, spec), SINGLE, "cut off", f"{num_bytes} bytes")


def test_a_pointer_of_git_lfs(single):
    folder, spec = single
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n")
    assert_says(refusal(folder, spec), SINGLE, "git lfs pull")


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (b"{]", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a":3}', "broken at a"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}}', "broken at a"),
        (b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', "broken at a"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}', "broken at a"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}}', "broken at a"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_a_broken_header(single, header, part):
    folder, spec = single
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert_says(refusal(folder, spec), SINGLE, part)


def test_missing_tensors(single):
    folder, spec = single
    names = {f"model.layers.{i}.mlp.{part}_proj.weight" for i in (0, 1) for part in ("up", "down")}
    change(folder, **{name.replace(".", "__"): None for name in names})
    message = refusal(folder, spec)
    assert_says(message, "missing: model.layers.0.mlp.up_proj.weight", "1 more", spec.name)


def test_a_missing_lm_head_has_its_advice(single, models):
    folder, spec = single
    change(folder, lm_head__weight=None)
    assert_says(refusal(folder, spec), "missing: lm_head.weight", "tie_word_embeddings")


def test_tensors_that_are_not_the_models(single):
    folder, spec = single
    change(folder, **{f"model__layers__{i}__extra": torch.zeros(2) for i in range(5)})
    assert_says(refusal(folder, spec), "not part of it: model.layers.0.extra", SINGLE, "2 more")


def test_tensors_in_a_shard_that_the_index_does_not_list(sharded):
    folder, spec = sharded
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][Q_PROJ]
    save_file(load_file(shard) | {"lora_a": torch.zeros(2)}, shard)
    assert_says(refusal(folder, spec), f"not part of it: lora_a ({shard.name})")


def test_more_layers_than_the_model_has(single):
    folder, spec = single
    message = refusal(folder, spec.model_copy(update={"num_layers": 1}))
    assert_says(message, "not part of it: model.layers.1.", SINGLE)


def test_a_bias_that_the_model_lacks(single):
    folder, spec = single
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(48))
    assert_says(refusal(folder, spec), "model.layers.0.self_attn.q_proj.bias")


def test_a_misshapen_tensor_has_both_shapes(single):
    folder, spec = single
    change(folder, **{Q_PROJ.replace(".", "__"): torch.zeros(48, 40)})
    assert_says(refusal(folder, spec), f"{Q_PROJ} ({SINGLE}) is [48, 40], not [48, 48]")


def test_a_dtype_that_is_not_read(single):
    folder, spec = single
    change(folder, **{Q_PROJ.replace(".", "__"): torch.zeros(48, 48, dtype=torch.float64)})
    assert_says(refusal(folder, spec), f"{Q_PROJ} ({SINGLE}) is F64", "BF16, F16, F32")


@pytest.mark.parametrize("num_bytes", [None, 3000])
def test_a_file_that_goes_or_shrinks_after_the_check(single, num_bytes):
    folder, spec = single
    opened = HfFolder.open(folder, spec)
    path = folder / SINGLE
    content = path.read_bytes()
    path.unlink()
    if num_bytes is not None:
        path.write_bytes(content[:num_bytes])
    flat = torch.empty(spec.group_layout("1").size_bytes, dtype=torch.uint8)
    with pytest.raises(WeightsError, match=r"model\.safetensors: (ends within|cannot be read)"):
        opened.read_group("1", flat)
