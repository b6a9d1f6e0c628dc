"""Options: what is refused, and how amounts are written."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from twinstream.schedule.errors import ArgumentError
from twinstream.training.amounts import Every, every, source_of, steps_of
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.planning import expected_packing
from twinstream.training.rates import LearningRate
from twinstream.training.trainer import Trainer


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    known = {"model": "tiny", "data": ["a"], "output": tmp_path}
    for wrong, message in (
        ({"learning_rates": 1}, "no option learning_rates: did you mean 'learning_rate'"),
        ({"beta2": 1.0}, "beta2 is 1.0: input should be less than 1"),
        ({"data": 3}, "data is 3"),
        ({"steps": "many"}, "steps is 'many'"),
    ):
        with pytest.raises(OptionsError, match=re.escape(message)):
            TrainOptions.of(known | wrong)
    assert TrainOptions.of(known | {"steps": "12", "epochs": "0.5"}).steps == 12


@pytest.mark.parametrize("given", [{"pp": 2}, {"dp": 2, "zero": 3}, {"pipeline": "gpipe"}])
def test_layouts_are_of_several_ranks(given: dict[str, object], tmp_path: Path) -> None:
    options = TrainOptions.of({"model": "tiny", "data": ("d",), "output": tmp_path, **given})
    with pytest.raises(OptionsError, match=f"{'.*'.join(given)}: of several ranks"):
        Trainer(options)
    alone = {"ranks": 1, "pp": 1, "dp": 1, "zero": 0}
    Trainer(TrainOptions.of({"model": "tiny", "data": ("d",), "output": tmp_path, **alone}))


def test_amounts() -> None:
    assert every("x", "90s") == Every(seconds=90.0) and every("x", "never") == Every()
    assert every("x", "5").is_due(10, 0.0) and not every("x", "5").is_due(11, 1e9)
    assert every("x", "2h").is_due(11, 7200.0) and not every("x", "never").is_due(0, 1e9)
    for text in ("", "0", "-1", "1.5", "0min", "1 day"):
        with pytest.raises(ArgumentError, match="neither"):
            every("save_every", text)
    for text in ("", "-3", "101%", "nan%", "3.5"):
        with pytest.raises(ArgumentError, match="neither"):
            steps_of("warmup", text, 100)
    assert source_of("a.jsonl=0.5").weight == 0.5 and source_of("a=b.txt").path == Path("a=b.txt")


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd", "constant"])
def test_rates_rise_hold_and_fall_to_the_floor(decay: str) -> None:
    rate = LearningRate(2.0, 100, 10, decay, floor=0.25, cooldown_steps=30)  # type: ignore[arg-type]
    rates = [rate(step) for step in range(1, 101)]
    assert rates[:11] == pytest.approx([2.0 * step / 11 for step in range(1, 12)])
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rate(71) == 2.0 if decay in ("wsd", "constant") else rate(71) < 2.0
    assert rate(101) == pytest.approx(2.0 if decay == "constant" else 0.5)
    middle = {"linear": 1.25, "cosine": 1.25, "wsd": 2.0, "constant": 2.0}[decay]
    assert rate(56) == pytest.approx(middle)


def test_wsd_falls_as_one_less_a_root() -> None:
    rate = LearningRate(1.0, 100, 0, "wsd", cooldown_steps=40)
    assert rate(61) == 1.0 and rate(71) == pytest.approx(0.5) and rate(101) == 0.0


@pytest.mark.parametrize("longest", [64, 100, 2048])
def test_expected_lengths_fill_a_chunk_as_the_data_does(longest: int) -> None:
    import numpy as np

    lengths = np.minimum(longest, np.random.default_rng(0).geometric(1 / 40, 2000)).astype(np.int64)
    packing = expected_packing(lengths, longest)
    assert packing.tokens == longest and packing.longest <= longest
    found = np.array(packing.expected_lengths, float)
    attention = (found**2).sum() / found.sum()
    assert attention == pytest.approx((lengths**2).sum() / lengths.sum(), rel=0.5)
    assert packing.most_sequences >= len(packing.expected_lengths)


def test_numbers_of_a_file_are_read_as_those_of_flags() -> None:
    given = {"model": "1e3", "data": ("d",), "output": "o", "seq_len": "2k", "steps": "1e3"}
    found = TrainOptions.of(given | {"learning_rate": "1e-4", "warmup": "0.1"})
    assert (found.seq_len, found.steps, found.learning_rate) == (2048, 1000, 1e-4)
    assert (found.model, found.warmup) == ("1e3", "0.1")
    with pytest.raises(OptionsError, match="seq_len is '2x'"):
        TrainOptions.of(given | {"seq_len": "2x"})
