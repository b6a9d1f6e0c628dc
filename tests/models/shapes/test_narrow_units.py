"""Which units compute in few bits, and experts that take no more than their capacity."""

import pytest
from pydantic import ValidationError

from tests.models.shapes.shapes import GATED, ROUTED
from twinstream.models.layouts.saved import saved_bytes
from twinstream.models.layouts.work import PartWork, ShapeWork
from twinstream.models.recipes.recipe import NARROW_UNITS, USUALLY_NARROW, KernelChoice, NarrowUnit


def work_of(*narrow: NarrowUnit) -> ShapeWork:
    return ShapeWork(shape=GATED, seq_len=32, matmul_dtype="fp8", narrow=narrow)


def in_fp8(part: PartWork) -> list[str]:
    named = {"forward": part.forward, "input": part.backward_input, "weight": part.backward_weight}
    return [name for name, works in named.items()
            if any(one.dtype == "fp8" and one.unit != "cast" for one in works)]  # fmt: skip


def test_each_unit_multiplies_in_the_dtype_that_is_asked_for() -> None:
    for work, ffn, head, core in (
        (work_of(*USUALLY_NARROW), ["forward", "input", "weight"], [], "bfloat16"),
        (work_of("products"), ["forward", "input"], [], "bfloat16"),
        (work_of("head"), [], ["forward", "input", "weight"], "bfloat16"),
        (work_of("attention"), [], [], "fp8"),
        (work_of(*NARROW_UNITS), ["forward", "input", "weight"],
         ["forward", "input", "weight"], "fp8"),
    ):  # fmt: skip
        assert in_fp8(work.mlp()) == ffn and in_fp8(work.head()) == head
        assert {one.dtype for one in work.core_attention().forward if one.unit != "cast"} == {core}


def test_attention_in_fp8_moves_half_the_bytes_and_casts_what_it_reads() -> None:
    (wide,), (cast, narrow) = (
        work_of(*units).core_attention().forward for units in (("products",), ("attention",))
    )  # fmt: skip
    assert narrow.flops == wide.flops and 2 * narrow.hbm_bytes == wide.hbm_bytes
    # 32 tokens of 8 + 2 + 2 heads of 6: read in two bytes, written in one
    assert (cast.unit, cast.hbm_bytes) == ("cast", 32 * 12 * 6 * 3)


def test_gradients_of_weights_in_bf16_keep_wide_inputs_and_nothing_is_transposed() -> None:
    usual, products = work_of(*USUALLY_NARROW), work_of("products")
    wide = ShapeWork(shape=GATED, seq_len=32)
    assert saved_bytes(usual, "none") < saved_bytes(products, "none") == saved_bytes(wide, "none")
    first, second = (
        next(one for one in work.mlp().forward if one.unit == "cast") for work in (usual, products)
    )
    assert first.hbm_bytes - second.hbm_bytes == 32 * 40  # one copy of a byte an element less


def test_gradients_need_products_and_documents_tell_the_exception() -> None:
    with pytest.raises(ValidationError, match="add products"):
        KernelChoice(vector="megatron", matmuls="fp8", narrow=("gradients",))
    usual = KernelChoice(vector="megatron", matmuls="fp8")
    assert "narrow" not in usual.model_dump()
    told = usual.model_copy(update={"narrow": ("head",)}).model_dump_json()
    assert KernelChoice.model_validate_json(told).narrow == ("head",)


@pytest.mark.parametrize(
    ("imbalance", "capacity", "rows", "sent"),
    [(1.0, None, 16, 64), (1.5, None, 24, 64), (1.5, 1.25, 20, 64), (1.5, 2.0, 24, 64),
     (1.0, 0.5, 8, 32)],
)  # fmt: skip
def test_experts_take_no_more_rows_than_their_capacity(imbalance, capacity, rows, sent) -> None:
    """32 tokens of 2 experts each, of 8 experts on 4 ranks of tp: 16 rows a rank in the mean."""
    work = ShapeWork(
        shape=ROUTED, seq_len=32, tp=4, ep=4, etp=1, expert_imbalance=imbalance,
        capacity_factor=capacity,
    )  # fmt: skip
    assert (work.expert_tokens, work.routed_tokens) == (rows, sent)


def test_a_token_is_sent_once_to_each_node_that_has_one_of_its_experts() -> None:
    """Of 8 experts on 2 nodes a token's 2 lie on 2 (1 - 1/4) = 1.5 in the mean; of a router that
    chooses within one of 2 groups on one."""
    assert ROUTED.experts is not None
    grouped = ROUTED.experts.model_copy(update={"num_groups": 2, "groups_per_token": 1})
    for experts, sent in ((ROUTED.experts, 48), (grouped, 32)):
        shape = ROUTED.model_copy(update={"experts": experts})
        work = ShapeWork(shape=shape, seq_len=32, ep=8, expert_nodes=2)
        assert (work.routed_tokens, work.sent_rows) == (64, sent)
    assert ShapeWork(shape=ROUTED, seq_len=32, ep=8).sent_rows == 64
