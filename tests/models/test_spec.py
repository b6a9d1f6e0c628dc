"""ModelSpec, the presets, and loading a model by name."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.models.small_model import SMALL
from twinstream.models.decoders.config import HfConfigError
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.presets import UnknownModelError, executable_presets, load_model, load_preset

SIZES = {
    "1b": (16, 2048, 32, 8, 64, 8192, 128256),
    "8b": (32, 4096, 32, 8, 128, 14336, 128256),
    "15b": (64, 4096, 32, 8, 128, 14336, 128256),
    "32b": (64, 5120, 40, 8, 128, 27648, 152064),
    "tiny": (4, 128, 4, 2, 32, 384, 256),
    "tiny-qwen3": (4, 128, 4, 2, 64, 384, 256),
}


def small(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(SMALL.model_dump() | changes)


def test_the_presets_are_the_expected_ones_with_the_expected_sizes() -> None:
    assert set(SIZES) < set(executable_presets())
    for name, sizes in SIZES.items():
        s = load_preset(name)
        assert sizes == (
            s.num_layers, s.d_model, s.num_heads, s.num_kv_heads, s.head_dim, s.d_ff, s.vocab_size
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions"), [("1b", 1.498), ("8b", 8.030), ("15b", 15.010), ("32b", 32.763)]
)
def test_parameter_totals_of_the_presets(name: str, billions: float) -> None:
    assert round(load_preset(name).num_parameters / 1e9, 3) == billions


def test_parameter_count_of_a_small_model_by_hand() -> None:
    # d_q = 24, d_kv = 12. qkv 48 x 10, o 10 x 24, two norms of 10, FFN 3 x 10 x 7: 950 per block.
    assert small().num_block_parameters == 480 + 240 + 20 + 210 == 950
    # three blocks, final norm 10, embedding and head 110 each
    assert small().num_parameters == 3 * 950 + 10 + 2 * 110 == 3080
    assert small(tied_embeddings=True).num_parameters == 3080 - 110
    assert small(qkv_bias=True).num_parameters == 3080 + 3 * 48
    assert small(qk_norm=True).num_parameters == 3080 + 3 * 2 * 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_kv_heads": 8}, "num_heads 4 is not a multiple of num_kv_heads 8"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"num_layers": 0}, "num_layers\n  Input should be greater than 0"),
        ({"vocab_size": -1}, "vocab_size\n  Input should be greater than 0"),
        ({"d_model": 10.0}, "d_model\n  Input should be a valid integer"),
        ({"norm_eps": 0.0}, "norm_eps\n  Input should be greater than 0"),
        ({"rope_theta": float("inf")}, "rope_theta\n  Input should be a finite number"),
        ({"dtype": "float16"}, "dtype\n  Input should be 'bfloat16' or 'float32'"),
        ({"name": ""}, "name\n  String should have at least 1 character"),
        ({"dropped": 0.1}, "dropped\n  Extra inputs are not permitted"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        small(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["9b", "", "../presets/8b", "8b.toml"])
def test_an_unknown_preset_says_where_they_are_listed(name: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        load_preset(name)
    assert caught.value.name == name
    assert f"unknown model '{name}'" in str(caught.value)
    assert "`twinstream models` lists the" in str(caught.value)


def write_config(folder: Path) -> Path:
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def test_a_model_loads_by_preset_name_by_file_and_by_folder(tmp_path: Path) -> None:
    file = write_config(tmp_path / "mine")
    assert load_model("8b") == load_preset("8b")
    assert load_model(file) == load_model(str(file)) == load_model(file.parent)
    assert load_model(file).name == "mine"
    assert load_model(file).d_model == 8


def test_a_preset_name_wins_over_a_folder_but_a_path_means_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path / "8b")
    monkeypatch.chdir(tmp_path)
    assert load_model("8b").d_model == 4096
    assert load_model("./8b").d_model == 8
    assert load_model(Path("8b")).d_model == 8


@pytest.mark.parametrize("name", ["9b", "no such folder"])
def test_what_is_neither_a_preset_nor_a_path_is_an_unknown_model(name: str) -> None:
    with pytest.raises(UnknownModelError, match=r"path of a Hugging Face config\.json"):
        load_model(name)


def test_a_name_on_hugging_face_says_how_it_is_fetched() -> None:
    with pytest.raises(UnknownModelError, match="hf download meta-llama/Meta-Llama-3-8B"):
        load_model("meta-llama/Meta-Llama-3-8B")


def test_a_path_that_ends_in_json_is_never_taken_for_a_name(tmp_path: Path) -> None:
    with pytest.raises(HfConfigError, match="there is no such file"):
        load_model(str(tmp_path / "config.json"))
