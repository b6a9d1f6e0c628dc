"""Splits that cannot be say why, with numbers."""

import pytest

from tests.models.shapes.shapes import GATED, PLAIN, ROUTED
from twinstream.models.layouts.rank_sizes import RankSizes, UnknownWidthError, shape_refusals


def test_what_fits_is_not_refused() -> None:
    sizes = RankSizes(shape=ROUTED, seq_len=32, tp=4, cp=2, ep=8, sequence_parallel=True)
    assert shape_refusals(sizes, pp=3) == []


@pytest.mark.parametrize(
    ("shape", "split", "told"),
    [
        (GATED, {"tp": 3}, "8 heads are not divisible by tp 3"),
        (GATED, {"tp": 3}, "2 KV heads are neither divisible by tp 3 nor divide it"),
        (GATED, {"tp": 16}, "d_ff 56 is not divisible by tp 16"),
        (GATED, {"pp": 4}, "3 layers are fewer than pp 4"),
        (GATED, {"ep": 2}, "ep is 2, but gated has no experts"),
        (GATED, {"cp": 3}, "seq_len 32 is not divisible by 2 x cp 3, two slices a rank"),
        (ROUTED, {"ep": 3}, "8 experts are not divisible by ep 3"),
        (ROUTED, {"tp": 16}, "d_ff of an expert 24 is not divisible by tp 16"),
        (ROUTED, {"tp": 1, "etp": 5}, "d_ff of an expert 24 is not divisible by etp 5"),
        (ROUTED, {"tp": 32}, "d_ff of the shared expert 16 is not divisible by tp 32"),
        (PLAIN, {"seq_len": 128}, "seq_len 128 is more than the 64 learned positions"),
        (
            GATED, {"tp": 8, "cp": 8, "sequence_parallel": True},
            "4 tokens of a sequence on a rank are not divisible by tp 8, as sequence parallelism "
            "needs",
        ),
    ],
)  # fmt: skip
def test_a_split_that_cannot_be_says_why(shape, split, told) -> None:
    pp = split.get("pp", 1)
    rest = {key: value for key, value in split.items() if key != "pp"}
    sizes = RankSizes(**({"shape": shape, "seq_len": 32} | rest))
    assert told in shape_refusals(sizes, pp)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UnknownWidthError, match="unknown dtype 'bf16'"):
        RankSizes(shape=GATED, seq_len=32, dtype="bf16")
