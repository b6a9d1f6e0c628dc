"""Layouts of the flat parameter tensors."""

from math import prod

import pytest

from tests.models.small_model import SMALL
from twinstream.models.layout import FlatLayout, block_layout, embedding_layout, head_layout
from twinstream.models.presets import executable_presets, load_preset


def rows(layout: FlatLayout) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(t.name, t.shape, t.offset_bytes, t.size_bytes) for t in layout.tensors]


def test_block_layout_by_hand() -> None:
    # d_q = 24, d_kv = 12, bf16; sizes in bytes, each start rounded up to 256
    layout = block_layout(SMALL)
    assert rows(layout) == [
        ("attention_norm", (10,), 0, 20),
        ("qkv_proj", (48, 10), 256, 960),
        ("o_proj", (10, 24), 1280, 480),
        ("ffn_norm", (10,), 1792, 20),
        ("gate_up_proj", (14, 10), 2048, 280),
        ("down_proj", (10, 7), 2560, 140),
    ]
    assert layout.size_bytes == 2816


def test_bias_and_qk_norm_sit_between_qkv_and_output_projection() -> None:
    layout = block_layout(SMALL.model_copy(update={"qkv_bias": True, "qk_norm": True}))
    assert rows(layout)[1:6] == [
        ("qkv_proj", (48, 10), 256, 960),
        ("qkv_bias", (48,), 1280, 96),
        ("q_norm", (6,), 1536, 12),
        ("k_norm", (6,), 1792, 12),
        ("o_proj", (10, 24), 2048, 480),
    ]
    assert layout.size_bytes == 2816 + 3 * 256


def test_head_and_embedding_layouts_by_hand() -> None:
    assert rows(head_layout(SMALL)) == [("final_norm", (10,), 0, 20), ("head", (11, 10), 256, 220)]
    assert head_layout(SMALL).size_bytes == 512
    assert rows(embedding_layout(SMALL)) == [("embedding", (11, 10), 0, 220)]
    assert embedding_layout(SMALL).size_bytes == 256


def test_a_tied_model_has_no_head_of_its_own() -> None:
    tied = SMALL.model_copy(update={"tied_embeddings": True})
    assert rows(head_layout(tied)) == [("final_norm", (10,), 0, 20)]
    assert head_layout(tied).size_bytes == 256


def test_float32_doubles_the_sizes() -> None:
    layout = block_layout(SMALL.model_copy(update={"dtype": "float32"}))
    assert layout.tensor("qkv_proj").size_bytes == 48 * 10 * 4


def test_the_8b_block_has_no_padding() -> None:
    d, d_kv, f = 4096, 1024, 14336
    elements = 2 * d + (2 * d * d + 2 * d * d_kv) + 3 * d * f
    assert elements == 218_112_000
    assert block_layout(load_preset("8b")).size_bytes == 2 * elements


@pytest.mark.parametrize("name", executable_presets())
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"qkv_bias": True}], ids=str)
def test_layouts_hold_exactly_the_parameters_of_the_model(
    name: str, options: dict[str, bool]
) -> None:
    spec = load_preset(name).model_copy(update=options)
    per_block = sum(
        prod(t.shape)
        for group in spec.layer_groups(spec.num_layers - 1)
        for t in spec.group_layout(group).tensors
    )
    ends = (*head_layout(spec).tensors, *embedding_layout(spec).tensors)
    assert per_block == spec.num_block_parameters
    assert spec.num_layers * per_block + sum(prod(t.shape) for t in ends) == spec.num_parameters


@pytest.mark.parametrize("name", executable_presets())
def test_every_inner_tensor_is_aligned_and_none_overlap(name: str) -> None:
    spec = load_preset(name)
    for layout in (block_layout(spec), head_layout(spec), embedding_layout(spec)):
        end_bytes = 0
        for tensor in layout.tensors:
            assert tensor.offset_bytes % 256 == 0
            assert end_bytes <= tensor.offset_bytes < end_bytes + 256
            assert tensor.size_bytes == prod(tensor.shape) * spec.itemsize
            end_bytes = tensor.offset_bytes + tensor.size_bytes
        assert layout.size_bytes % 256 == 0
        assert end_bytes <= layout.size_bytes < end_bytes + 256
