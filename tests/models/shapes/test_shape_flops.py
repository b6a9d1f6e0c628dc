"""Model FLOPs of shapes."""

from tests.models.shapes.shapes import GATED, PLAIN, ROUTED
from twinstream.models.shapes.flops import shape_flops_per_sequence


def test_flops_of_a_plain_shape_are_korthikantis_less_the_masked_half() -> None:
    # arXiv:2205.05198, appendix A: 72 B L s h^2 (1 + s / 6h + v / 12hL), attention not causal
    s, h, layers, v = 16, 48, 3, 200
    published = 72 * layers * s * h**2 + 12 * layers * s**2 * h + 6 * s * h * v
    assert shape_flops_per_sequence(PLAIN, s) == published - 6 * layers * s**2 * h


def test_a_gate_is_a_third_matrix() -> None:
    plain = GATED.model_copy(update={"mlp": "gelu"})
    gate = 3 * 3 * 2 * 16 * 40 * 56
    assert shape_flops_per_sequence(GATED, 16) - shape_flops_per_sequence(plain, 16) == gate


def test_only_a_tokens_own_experts_count_and_the_router() -> None:
    columns = 8 + 3 * (2 * 24 + 16) - 3 * 56
    more = 3 * 3 * 2 * 16 * 40 * columns
    assert shape_flops_per_sequence(ROUTED, 16) - shape_flops_per_sequence(GATED, 16) == more
