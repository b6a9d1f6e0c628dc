"""Which layers are on which virtual stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstream.models.layouts.layout import Layout, LayoutError, stages_of


def sizes(num_layers: int, pp: int, virtual: int = 1, **fields) -> list[int]:
    pipeline = "interleaved" if virtual > 1 else "1f1b"
    layout = Layout(pp=pp, virtual_stages=virtual, pipeline=pipeline, **fields)
    return [len(span) for span in stages_of(layout, num_layers)]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 60))
def test_stages_are_all_layers_in_order_and_as_even_as_can_be(pp, virtual, more):
    num_layers = pp * virtual + more
    layout = Layout(pp=pp, virtual_stages=virtual, pipeline="ring")
    spans = stages_of(layout, num_layers)
    assert [layer for span in spans for layer in span] == list(range(num_layers))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


def test_where_layers_do_not_divide_embedding_and_head_count_as_one_each_or_the_first_have_more():
    assert sizes(80, 4) == [20] * 4
    assert sizes(126, 16) == [7, *[8] * 14, 7]  # Llama 3 405B, arXiv:2407.21783, section 3.3.2
    assert sizes(30, 8) == [3, *[4] * 6, 3]
    assert sizes(10, 4) == [2, 3, 3, 2]
    assert sizes(9, 4) == [3, 2, 2, 2]
    assert sizes(10, 3, virtual=2) == [1, 2, 2, 2, 2, 1]


def test_a_layout_may_say_its_own_stages_even_without_layers():
    assert sizes(5, 3, stage_layers=(4, 0, 1)) == [4, 0, 1]


def test_stages_that_do_not_add_up_are_refused():
    with pytest.raises(LayoutError, match=r"has 2 stages of 5 layers together, .* = 3 of 5 layers"):
        sizes(5, 3, stage_layers=(4, 1))
    with pytest.raises(LayoutError, match="has 3 stages of 6 layers together"):
        sizes(5, 3, stage_layers=(4, 1, 1))
    with pytest.raises(LayoutError, match="5 layers are fewer than pp x virtual_stages = 3 x 2"):
        sizes(5, 3, virtual=2)
