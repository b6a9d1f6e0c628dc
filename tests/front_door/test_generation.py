"""Generating text, planned: against arithmetic, published rates, and caps that it does not fit."""

import csv
import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.front_door.command_line import call
from twinstream.models.presets import load_model
from twinstream.planner.generation import TextGeneration
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.errors import TwinstreamError
from twinstream.study.generation import PlannedGeneration

PUBLISHED = Path(__file__).parents[2] / "docs" / "benchmarks" / "generation.csv"
ROWS = list(csv.DictReader(PUBLISHED.read_text("utf-8").splitlines()))


def planned(
    model: str, machine: str, generation: TextGeneration, device_mem: str | None = None
) -> PlannedGeneration:
    request = PlanRequest.of(
        model, machine, step=TrainingStep(seq_len=generation.prompt), device_mem=device_mem
    )
    return PlannedGeneration.of(generation, request)


def test_a_token_takes_what_its_bytes_take() -> None:
    """One sequence: all weights are read once a token, and the cache; each at the memory's rate."""
    found = planned("8b", "rtx4090", TextGeneration(1024, 256, 1))
    model = load_model("8b")
    embedding = model.vocab_size * model.d_model * 2
    cache = 32 * 2 * 8 * 128 * 2 * (1024 + 128)
    read = found.weights_bytes - embedding + cache
    assert found.weights_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert found.cache_bytes == 32 * 2 * 8 * 128 * 2 * (1024 + 256)
    assert read / 1008e9 < found.token_s < 1.25 * read / 1008e9


def test_prompts_take_what_their_flops_take() -> None:
    """2 FLOPs a parameter and token, and the scores, but of the head one row a sequence."""
    found = planned("8b", "h100", TextGeneration(2048, 2, 8))
    model = load_model("8b")
    blocks = 8_030_261_248 - 2 * model.vocab_size * model.d_model
    flops = 8 * 2048 * (2 * blocks + 2 * 2048 * 4096 * 32) + 8 * 2 * 4096 * model.vocab_size
    assert found.prompts.schedule.model_flops == pytest.approx(flops, rel=1e-3)
    assert 1.0 < found.first_token_s / (flops / 989e12) < 2.0


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['card']}-{row['model']}-{row['decode']}"
)
def test_published_rates_are_met(row: dict[str, str]) -> None:
    generation = TextGeneration(int(row["prompt"]), int(row["decode"]), int(row["batch"]))
    found = planned(row["model"], row["card"], generation)
    error = found.decode_tokens_per_s / float(row["measured_tokens_per_s"]) - 1
    worst = found.uncertainty.worst
    assert worst is not None
    assert abs(error) <= worst


def test_a_cache_that_does_not_fit_is_kept_on_the_host() -> None:
    """Then a token takes as long as the link needs for what the device has no room for."""
    caps = [None, "2GiB"]
    steps = [planned("llama3.2-1b", "rtx4090", TextGeneration(1024, 16, 24), cap) for cap in caps]
    assert steps[0].cache_bytes == 16 * 2 * 8 * 64 * 2 * (1024 + 16) * 24
    for more, less in pairwise(steps):
        assert less.token_s > more.token_s
        assert less.figures["gap"] < 0.2
    away = steps[0].weights_bytes + steps[0].cache_bytes - 2 * 2**30
    assert steps[-1].token_s > away / 32e9


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ((0, 8, 1), "prompt"),
        ((8, 8, 0), "batch"),
        ((8, 1.5, 1), "decode"),
    ],
)
def test_numbers_that_are_none_are_refused(generation: tuple[int, int, int], said: str) -> None:
    with pytest.raises(TwinstreamError, match=said):
        TextGeneration(*generation)


ASKED = ("plan", "llama3.2-1b", "--machine", "rtx4090", "--task", "inference")


def test_the_command_says_what_python_does() -> None:
    found = planned("llama3.2-1b", "rtx4090", TextGeneration(512, 32, 4))
    asked = (*ASKED, "--prompt", "512", "--decode", "32", "--batch", "4")
    told = call(*asked, "--json").json()
    assert {**told, "plan_seconds": 0, "uncertainty": 0} == {
        **json.loads(json.dumps(found.figures)), "plan_seconds": 0, "uncertainty": 0,
    }  # fmt: skip
    assert told["limits"]["first token"] == ["hbm"]
    shown = call(*asked).out
    assert "first token" in shown and "tokens/s" in shown and "keys and values" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prompt", "8"), "needs --decode"),
        (("--prompt", "8", "--decode", "8", "--tokens-per-step", "64"), "--tokens-per-step is of"),
        (("--prompt", "8", "--decode", "8", "--gpus", "2"), "one device"),
        (("--prompt", "8", "--decode", "8", "-o", "plan.json"), "--output is of"),
        (("--prompt", "0", "--decode", "8"), "prompt"),
        (("--task", "train", "--prompt", "8"), "--task inference"),
    ],
)
def test_what_is_of_training_is_refused(flags: tuple[str, ...], said: str) -> None:
    found = call(*ASKED, *flags)
    assert found.code == 2 and said in found.err and "Traceback" not in found.err
