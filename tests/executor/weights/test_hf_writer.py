"""Flat tensors to folders that transformers loads unedited."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.executor.weights.coded_folders import KINDS, encode
from tests.executor.weights.small_models import (
    MODELS,
    WITH_EXPERTS,
    logits,
    random_model,
    read_flats,
    save,
)
from twinstream.executor.state.training_state import initial_state
from twinstream.executor.weights import durable_files
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.executor.weights.hf_writer import HfOutline
from twinstream.models.presets import load_preset
from twinstream.models.spec import ModelSpec

INDEX = "model.safetensors.index.json"
SHARDINGS = pytest.mark.parametrize("max_shard_size", ["1GB", "30KB"])


@pytest.fixture(scope="module")
def models():
    return {name: random_model(name) for name in MODELS}


def again(model, folder, max_shard_size="1GB"):
    """What transformers saved, its spec, and a folder and the flat tensors to write."""
    saved = folder / "saved"
    spec = save(model, saved, max_shard_size)
    return saved, spec, folder / "written", read_flats(HfFolder.open(saved, spec))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def weight_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@SHARDINGS
@pytest.mark.parametrize("name", MODELS)
def test_what_was_read_is_written_as_it_was(models, name, max_shard_size, tmp_path):
    saved, spec, written, flats = again(models[name], tmp_path, max_shard_size)
    HfOutline.of(spec, saved).write(written, flats.__getitem__)
    assert {path.name for path in written.iterdir()} == {path.name for path in saved.iterdir()}
    assert weight_bytes(written) == weight_bytes(saved)
    assert (written / "config.json").read_bytes() == (saved / "config.json").read_bytes()
    if max_shard_size != "1GB":
        assert json.loads((written / INDEX).read_text()) == json.loads((saved / INDEX).read_text())
    assert torch.equal(logits(load(written)), logits(models[name]))


@SHARDINGS
@pytest.mark.parametrize("name", MODELS)
def test_without_a_folder_to_be_like_transformers_loads_the_same_model(
    models, name, max_shard_size, tmp_path
):
    _, spec, written, flats = again(models[name], tmp_path)
    max_shard_bytes = 10**9 if max_shard_size == "1GB" else 30_000
    HfOutline.of(spec, None, max_shard_bytes).write(written, flats.__getitem__)
    files = sorted(weight_bytes(written))
    if max_shard_size == "1GB":
        assert files == ["model.safetensors"]
    else:
        count = len(files)
        assert count > 2
        assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        assert max(map(len, weight_bytes(written).values())) < 30_000 + 3_000
        total = sum(t.nbytes for file in files for t in load_file(written / file).values())
        assert json.loads((written / INDEX).read_text())["metadata"]["total_size"] == total
    assert ModelSpec.from_hf_config(written) == spec.model_copy(update={"name": "written"})
    loaded = load(written)
    assert loaded.dtype == models[name].dtype
    assert torch.equal(logits(loaded), logits(models[name]))


def test_the_bytes_are_those_of_the_safetensors_library(models, tmp_path):
    _, spec, written, flats = again(models["qwen2"], tmp_path)
    HfOutline.of(spec).write(written, flats.__getitem__)
    theirs = tmp_path / "theirs.safetensors"
    state = {name: t.contiguous() for name, t in models["qwen2"].state_dict().items()}
    save_file(state, theirs, metadata={"format": "pt"})
    assert (written / "model.safetensors").read_bytes() == theirs.read_bytes()


def test_shards_of_another_dtype_keep_names_and_division(models, tmp_path):
    saved, spec, written, _ = again(models["llama"], tmp_path, "30KB")
    spec = spec.model_copy(update={"dtype": "bfloat16"})
    flats = read_flats(HfFolder.open(saved, spec))
    HfOutline.of(spec, saved).write(written, flats.__getitem__)
    theirs, ours = (json.loads((path / INDEX).read_text()) for path in (saved, written))
    assert ours["weight_map"] == theirs["weight_map"]
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"] // 2
    config = json.loads((saved / "config.json").read_text())
    assert json.loads((written / "config.json").read_text()) == config | {"dtype": "bfloat16"}
    assert list(json.loads((written / "config.json").read_text())) == list(config)
    rounded = random_model("llama", torch.bfloat16)
    assert torch.equal(logits(load(written)), logits(rounded))


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": None}, {"torch_dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
    ],
)
def test_only_the_dtype_of_a_config_changes(models, said, written, tmp_path):
    saved, spec, folder, _ = again(models["llama"], tmp_path)
    config = json.loads((saved / "config.json").read_text())
    del config["dtype"]
    (saved / "config.json").write_text(json.dumps(config | said | {"zebra": "é"}))
    spec = spec.model_copy(update={"dtype": "bfloat16"})
    flats = read_flats(HfFolder.open(saved, spec))
    HfOutline.of(spec, saved).write(folder, flats.__getitem__)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert content == config | written | {"zebra": "é"}


def test_the_head_of_tied_embeddings_is_left_out_and_with_it_an_empty_shard(models, tmp_path):
    saved, spec, written, flats = again(models["llama_tied"], tmp_path)
    (saved / "model.safetensors").rename(saved / "one.safetensors")
    names = load_file(saved / "one.safetensors").keys()
    mapped = dict.fromkeys(names, "one.safetensors") | {"lm_head.weight": "two.safetensors"}
    (saved / INDEX).write_text(json.dumps({"weight_map": mapped}))
    save_file({"lm_head.weight": torch.zeros(97, 48)}, saved / "two.safetensors")
    HfOutline.of(spec, saved).write(written, flats.__getitem__)
    assert weight_bytes(written).keys() == {"one.safetensors"}
    assert json.loads((written / INDEX).read_text())["weight_map"].keys() == names
    assert torch.equal(logits(load(written)), logits(models["llama_tied"]))


def test_files_that_belong_to_a_model_are_copied_and_nothing_else(models, tmp_path):
    saved, spec, written, flats = again(models["llama"], tmp_path)
    copied = {
        **{"tokenizer.json": b"\x01{", "merges.txt": b"a b\n", "chat_template.jinja": b"{{x}}"},
        **{"additional_chat_templates/tool_use.jinja": b"{{y}}", "qwen.tiktoken": b"YQ== 0"},
        **{"preprocessor_config.json": b'{"auto_map": {"AutoProcessor": "own.Own"}}'},
        **{"own.py": b"x = 1", "sentencepiece.bpe.model": b"\x00"},
    }
    left = {"README.md": b"a", "optimizer.pt": b"b", "training_args.bin": b"c", "notes/a.py": b"d"}
    for name, content in (copied | left).items():
        (saved / name).parent.mkdir(exist_ok=True)
        (saved / name).write_bytes(content)
    HfOutline.of(spec, saved).write(written, flats.__getitem__)
    for name, content in copied.items():
        assert (written / name).read_bytes() == content
    assert not [name for name in left if (written / name).exists()]


@SHARDINGS
def test_layers_for_a_token_further_on_are_written_back_as_they_were(
    models, max_shard_size, tmp_path
):
    saved, spec, written, flats = again(models["dots1"], tmp_path, max_shard_size)
    config = json.loads((saved / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (saved / "config.json").write_text(json.dumps(config))
    path = next(iter(sorted(saved.glob("*.safetensors"))))
    more = {f"model.layers.2.{x}.weight": torch.rand(5, 3).half() for x in ("eh_proj", "mlp.up")}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    if (saved / INDEX).exists():
        told = json.loads((saved / INDEX).read_text())
        told["weight_map"] |= dict.fromkeys(more, path.name)
        (saved / INDEX).write_text(json.dumps(told))
    flats = read_flats(HfFolder.open(saved, ModelSpec.from_hf_config(saved)))
    HfOutline.of(spec, saved).write(written, flats.__getitem__)
    assert weight_bytes(written) == weight_bytes(saved)
    (saved / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(WeightsError, match=r"not part of it: model\.layers\.2\.eh_proj"):
        HfFolder.open(saved, spec)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_for_a_token_further_on_that_are_codes_are_written_as_values(models, kind, tmp_path):
    saved, _, written, _ = again(models["dots1"], tmp_path)
    config = json.loads((saved / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (saved / "config.json").write_text(json.dumps(config))
    path, name = saved / "model.safetensors", "model.layers.2.eh_proj.weight"
    more = {name: torch.rand(16, 64), "model.layers.2.enorm.weight": torch.rand(16)}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    encode(saved, tmp_path / "values", kind, lambda one: one == name)
    spec = ModelSpec.from_hf_config(saved)
    flats = read_flats(HfFolder.open(saved, spec))
    HfOutline.of(spec, saved).write(written, flats.__getitem__)
    expected = load_file(tmp_path / "values" / "model.safetensors")
    found = load_file(written / "model.safetensors")
    assert found.keys() == expected.keys()
    assert torch.equal(found[name], expected[name].to(getattr(torch, spec.dtype)))
    assert torch.equal(found["model.layers.2.enorm.weight"], more["model.layers.2.enorm.weight"])


def test_like_a_folder_without_weights_takes_its_config_and_own_shards(models, tmp_path):
    saved, spec, written, flats = again(models["llama"], tmp_path)
    (saved / "model.safetensors").unlink()
    HfOutline.of(spec, saved, 40_000).write(written, flats.__getitem__)
    assert len(weight_bytes(written)) > 1
    assert (written / "config.json").read_bytes() == (saved / "config.json").read_bytes()
    assert torch.equal(logits(load(written)), logits(models["llama"]))


def test_random_weights_of_a_preset_are_loaded_by_transformers(tmp_path):
    spec = load_preset("tiny")
    state = initial_state(spec, seed=0)
    HfOutline.of(spec).write(tmp_path / "tiny", lambda group: state[f"param.{group}"])
    assert load(tmp_path / "tiny").num_parameters() == spec.num_parameters
    assert ModelSpec.from_hf_config(tmp_path / "tiny") == spec


def test_groups_are_asked_for_once_in_order(models, tmp_path):
    saved, spec, written, flats = again(models["llama"], tmp_path, "30KB")
    asked = []

    def read_group(group):
        asked.append(group)
        return flats[group]

    HfOutline.of(spec, saved).write(written, read_group)
    assert asked == ["embedding", "0", "1", "head"]


def test_every_file_and_the_folder_are_synced(models, tmp_path, monkeypatch):
    saved, spec, written, flats = again(models["llama"], tmp_path, "30KB")
    synced = set()
    fsync = os.fsync

    def record(handle):
        # Small files are synced under a name of their own, "config.json.1234.partial".
        synced.add(re.sub(r"\.\w+\.partial$", "", Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    HfOutline.of(spec, saved).write(written, flats.__getitem__)
    assert synced >= {path.name for path in saved.iterdir()} | {"written", tmp_path.name}


def test_a_folder_that_has_weights_is_left_alone(models, tmp_path):
    saved, spec, _, flats = again(models["llama"], tmp_path)
    before = weight_bytes(saved)
    with pytest.raises(WeightsError, match="has weights already"):
        HfOutline.of(spec, saved).write(saved, flats.__getitem__)
    assert weight_bytes(saved) == before


def test_an_index_that_does_not_say_where_a_tensor_is(models, tmp_path):
    saved, spec, written, flats = again(models["llama"], tmp_path, "30KB")
    index = json.loads((saved / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (saved / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"index\.json: does not say .* model\.norm\.weight"):
        HfOutline.of(spec, saved).write(written, flats.__getitem__)


def test_too_little_room_is_said_before_anything_is_written(models, tmp_path, monkeypatch):
    saved, spec, written, flats = again(models["llama"], tmp_path)
    usage = shutil._ntuple_diskusage(10**9, 10**9, 1234)
    monkeypatch.setattr(durable_files.shutil, "disk_usage", lambda path: usage)
    num_bytes = (saved / "model.safetensors").stat().st_size
    with pytest.raises(WeightsError, match=f"written: .*needs {num_bytes} bytes.* 1234 are free"):
        HfOutline.of(spec, saved).write(written, flats.__getitem__)
    assert list(written.iterdir()) == []


def test_a_disk_that_fills_up_names_the_file_and_its_bytes(models, tmp_path, monkeypatch):
    saved, spec, written, flats = again(models["llama"], tmp_path)

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightsError, match=r"config\.json: .*No space left on device; it needs"):
        HfOutline.of(spec, saved).write(written, flats.__getitem__)
    monkeypatch.undo()
    monkeypatch.setattr("twinstream.executor.weights.hf_writer.sync", full)
    num_bytes = (saved / "model.safetensors").stat().st_size
    said = (
        rf"model\.safetensors: .*No space left on device; it needs {num_bytes} bytes, and \d+ are"
    )
    with pytest.raises(WeightsError, match=said):
        HfOutline.of(spec, saved).write(written, flats.__getitem__)


def test_a_folder_that_cannot_be_made(models, tmp_path):
    saved, spec, _, flats = again(models["llama"], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"file/under: cannot be written: Not a directory"):
        HfOutline.of(spec, saved).write(tmp_path / "file" / "under", flats.__getitem__)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_that_are_one_tensor_are_read_and_written_so(models, name, tmp_path):
    """As transformers 5 has them in memory."""
    saved = tmp_path / "saved"
    spec = save(models[name], saved)
    state = {key: tensor.contiguous() for key, tensor in models[name].state_dict().items()}
    save_file(state, saved / "model.safetensors", metadata={"format": "pt"})
    opened = HfFolder.open(saved, spec)
    assert opened.fused
    flats = read_flats(opened)
    one_by_one = tmp_path / "one_by_one"
    models[name].save_pretrained(one_by_one)
    expected = read_flats(HfFolder.open(one_by_one, spec))
    assert all(torch.equal(flats[group], flat) for group, flat in expected.items())
    written = tmp_path / "written"
    HfOutline.of(spec, saved).write(written, flats.__getitem__)
    assert weight_bytes(written) == weight_bytes(saved)
