"""Numbers as people write them, and names of options, are the same in every command."""

import json
from pathlib import Path

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.schedule.sizes import parse_number
from twinstream.study.answer import StudyError
from twinstream.study.sweep.config import config_of

COST = ("cost", "8b", "--machine", "h100", "--json")
PLAN = ("plan", "--model", "tiny", "--machine", "cpu", "--effort", "quick", "--json")


@pytest.mark.parametrize(
    ("text", "number"),
    [("2k", 2 * 1024), ("2K", 2048), ("1.5k", 1536), ("64,128", 64128), ("1e12", 10**12),
     ("15T", 15 * 10**12), ("300B", 3 * 10**11), ("$2.50", 2.5), ("$1,250.5", 1250.5),
     ("9007199254740993", 2**53 + 1), ("1_000", 1000), (".5", 0.5)],
)  # fmt: skip
def test_numbers_as_people_write_them(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize("text", ["", "2x", "64,12", "k", "1e", "--1", "nan", "1e999k", "9" * 99])
def test_what_is_no_number(text):
    found = parse_number(text)
    assert found is None or found == float("inf")


def document(*arguments: object) -> object:
    told = call(*arguments)
    assert told.code == 0, told.err
    found = json.loads(told.out)
    found.pop("plan_seconds", None)
    return found


def test_tokens_prices_and_batches_have_the_names_of_other_commands():
    usual = document(*COST, "--dataset-size", 15 * 10**12, "--price-per-gpu-hour", 2.5,
                     "--batch-size", 512)  # fmt: skip
    other = document(*COST, "--tokens", "15T", "--price", "$2.50", "--global-batch", "512")
    assert usual == other


def test_a_model_is_given_in_either_way():
    step = ("--seq-len", 128, "--tokens-per-step", "1k")
    usual = document(*PLAN, *step)
    rest = (*PLAN[3:], "--seq-len", "128", "--tokens-per-step", "1,024")
    assert usual == document("plan", "tiny", *rest)
    cells = ("--machine", "cpu", "--seq-len", "128", "--tokens-per-step", "1k", "--jobs", 1)
    fit = document("fit", "tiny", *cells, "--json")
    assert fit == document("fit", *cells, "--model", "tiny", "--json")
    assert fit == document("fit", "--model=tiny", *cells, "--json")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((*PLAN, "--seq-len", "128", "--tokens-per-step", "some"), "'some' is no number"),
        ((*PLAN, "--seq-len", "128", "--tokens-per-step", "1.5"), "'1.5' is no whole number"),
        ((*PLAN, "--seq-len", "128", "--tokens-per-step", "0"), "needs to be at least 1, got 0"),
        (("train", "tiny", "d.jsonl", "-o", "o", "--seq-len", "64,128"), "several lengths"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(given, says):
    assert says in " ".join(error_of(*given).replace("\u2502", " ").split())


def test_a_sweep_reads_numbers_as_flags_do_and_texts_as_they_are():
    document = {
        "fixed": {"model": "8b", "machine": "h100", "seq_len": "2k", "price_per_gpu_hour": "$2.50"},
        "axes": {"tokens_per_step": ["16k", 32768], "device_mem": ["24GiB"]},
    }
    found = config_of(document, source="a test", folder=Path())
    assert found.fixed == document["fixed"] | {"seq_len": 2048, "price_per_gpu_hour": 2.5}
    assert found.axes == {"tokens_per_step": (16384, 32768), "device_mem": ("24GiB",)}
    with pytest.raises(StudyError, match=r"fixed.seq_len needs a positive whole number, got '2x'"):
        config_of({"fixed": document["fixed"] | {"seq_len": "2x"}}, source="a test", folder=Path())
