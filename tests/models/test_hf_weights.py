"""Names, shapes and places of Hugging Face's tensors."""

import pytest

from tests.models.published_configs import CONFIGS, read_config
from twinstream.models.decoders.config import HfConfigError
from twinstream.models.decoders.hf_weights import hf_weights
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.decoders.to_hf_config import to_hf_config
from twinstream.models.layout import block_layout, embedding_layout, head_layout
from twinstream.models.options import RopeScaling
from twinstream.models.presets import executable_presets, load_preset


def hf_model_on_meta(model_type: str, config: dict[str, object]):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    family = model_type.capitalize()
    with torch.device("meta"):
        made = getattr(transformers, f"{family}Config")(**config | {"num_hidden_layers": 2})
        return getattr(transformers, f"{family}ForCausalLM")(made)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_names_shapes_and_order_are_those_of_transformers(model_type, tmp_path):
    config = CONFIGS[model_type] | {"num_hidden_layers": 2}
    spec = read_config(tmp_path, config)
    model = hf_model_on_meta(model_type, CONFIGS[model_type])
    theirs = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert [(weight.name, weight.shape) for weight in hf_weights(spec)] == theirs


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_weights_of_a_group_tile_its_inner_tensors(model_type, tmp_path):
    spec = read_config(tmp_path, CONFIGS[model_type])
    layouts = dict.fromkeys(spec.parameter_groups, block_layout(spec))
    layouts |= {"embedding": embedding_layout(spec), "head": head_layout(spec)}
    assert len(layouts) == spec.num_layers + 2
    covered: dict[str, list[tuple[int, int]]] = {group: [] for group in layouts}
    for weight in hf_weights(spec):
        covered[weight.group].append((weight.offset_bytes, weight.end_bytes))
    for group, layout in layouts.items():
        starts = {
            inner.offset_bytes: inner.offset_bytes + inner.size_bytes for inner in layout.tensors
        }
        end = None
        for begin, after in sorted(covered[group]):
            assert begin == end or begin in starts
            end = after
            starts.pop(begin, None)
        assert not starts
    total = sum(weight.size_bytes for weight in hf_weights(spec))
    assert total == spec.num_parameters * spec.itemsize


def test_q_k_and_v_are_row_ranges_of_one_matrix_and_so_are_gate_and_up():
    spec = load_preset("tiny")  # d_model 128, d_q 128, d_kv 64, float32
    at = {weight.name.removeprefix("model.layers.1."): weight for weight in hf_weights(spec)}
    layout = block_layout(spec)
    qkv, gate_up = layout.tensor("qkv_proj"), layout.tensor("gate_up_proj")
    places = [at[f"self_attn.{part}_proj.weight"].offset_bytes for part in "qkv"]
    row_bytes = 4 * 128
    assert places == [qkv.offset_bytes + rows * row_bytes for rows in (0, 128, 128 + 64)]
    places = [at[f"mlp.{part}_proj.weight"].offset_bytes for part in ("gate", "up")]
    assert places == [gate_up.offset_bytes, gate_up.offset_bytes + spec.d_ff * row_bytes]


def stretched(spec: ModelSpec) -> ModelSpec:
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    return spec.model_copy(update={"rope_scaling": scaling})


@pytest.mark.parametrize("name", executable_presets())
def test_the_config_of_a_preset_is_read_back(name, tmp_path):
    spec = load_preset(name)
    for one in (spec, stretched(spec)):
        read = read_config(tmp_path, to_hf_config(one))
        assert read == one.model_copy(update={"name": read.name})


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_config_of_a_read_model_is_read_back_and_loaded(model_type, tmp_path):
    spec = read_config(tmp_path, CONFIGS[model_type])
    config = to_hf_config(spec)
    assert read_config(tmp_path, config) == spec
    model = hf_model_on_meta(config["model_type"], config)
    few = spec.model_copy(update={"num_layers": 2})
    assert sum(p.numel() for p in model.parameters()) == few.num_parameters


def test_a_model_that_no_family_is_like_is_refused():
    spec = load_preset("tiny").model_copy(update={"qkv_bias": True, "qk_norm": True})
    with pytest.raises(HfConfigError, match=r"'tiny' has qkv_bias .* and qk_norm"):
        to_hf_config(spec)
