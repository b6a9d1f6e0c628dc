"""Every public function answers a wrong argument with a TwinstreamError that says what it needs."""

import numpy as np
import pytest

import twinstream as ts

STEP = ts.TrainingStep(seq_len=64, tokens_per_step=256)
HUGE = ts.Packing.of((2**30, 2**30, 1))
WRONG = (5, None, 1.5, [], "no/such/file.xyz", object())


@pytest.fixture(scope="module")
def schedule() -> ts.Schedule:
    return ts.plan("tiny", "cpu", step=STEP, policy="resident")


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(ts.TwinstreamError) as caught:
        call(*arguments, **named)
    return str(caught.value)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
def test_wrong_kinds_are_refused_everywhere(wrong, schedule):
    refusal(ts.load_model, wrong)
    refusal(ts.load_machine, wrong)
    refusal(ts.plan, wrong, "cpu", step=STEP)
    refusal(ts.plan, "tiny", wrong, step=STEP)
    refusal(ts.plan, "tiny", "cpu", step=wrong)
    refusal(ts.PlanRequest.of, "tiny", "cpu", step=wrong)
    refusal(ts.simulate, wrong, "cpu")
    refusal(ts.verify, wrong)
    refusal(ts.conforms, wrong)
    if wrong is not None:  # which is the machine and the step that the schedule names itself
        refusal(ts.simulate, schedule, wrong)
        refusal(ts.conforms, schedule, wrong)
    refusal(ts.compare, schedule, wrong, wrong)
    refusal(ts.summarize, schedule, wrong, ts.load_machine("cpu"))
    refusal(ts.explain, schedule, wrong, ts.load_machine("cpu"))
    refusal(ts.write_report, "page.html", wrong, "cpu")
    refusal(ts.execute, wrong)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seq_len": 0}, "seq_len needs a whole number from 1"),
        ({"seq_len": 64.0}, "got 64.0"),
        ({"seq_len": True}, "seq_len"),
        ({"seq_len": 64, "tokens_per_step": "256"}, "tokens_per_step"),
        ({"seq_len": 64, "chunk_tokens": -1}, "chunk_tokens"),
        ({"seq_len": 64, "chunks_per_round": 1.0}, "chunks_per_round"),
        ({"seq_len": 64, "recipe": {}}, "recipe needs Recipe"),
        ({"seq_len": 64, "packing": (64,)}, "packing needs Packing"),
        ({"seq_len": 64, "chunk_tokens": 10**12}, "chunk_tokens"),
        ({"seq_len": 64, "chunks_per_round": 10**12}, "chunks_per_round"),
        ({"seq_len": 2**30, "packing": HUGE}, "sum of expected_lengths"),
    ],
)
def test_a_step_of_wrong_numbers_is_refused_when_it_is_made(given, told):
    assert told in refusal(ts.TrainingStep, **given)


@pytest.mark.parametrize("cap", ["device_mem", "host_mem"])
@pytest.mark.parametrize(
    ("given", "told"),
    [(24, "write '24GiB' in quotes"), (-1, "so many bytes"), (2.5, "needs int"), (True, "needs")],
)
def test_a_bare_number_is_no_size_of_memory(cap, given, told):
    message = refusal(ts.plan, "tiny", "cpu", step=STEP, **{cap: given})
    assert told in message and cap in message


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rate": float("nan")}, {"learning_rate": -1.0}, {"learning_rate": "1e-3"},
        {"num_steps": 0}, {"num_steps": 2.0}, {"seed": -1}, {"seed": 2**40}, {"timed_steps": 5},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_wrong_numbers_are_refused_when_they_are_made(given):
    assert next(iter(given)) in refusal(ts.RunSettings, **{"num_steps": 4, **given})


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (np.zeros(100), "float64"),
        (np.zeros((2, 50), np.int32), "(2, 50)"),
        ([1, 2, 3], "list"),
        (np.zeros(1, np.int32), "at least 2"),
        (np.array([3, -1]), "ids from 0"),
        (np.array([3, 10**6]), "1000000"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, told, schedule):
    message = refusal(ts.execute, schedule, ts.RunSettings("cpu", num_steps=1), tokens=tokens)
    assert told in message


def test_a_name_that_no_file_can_have_is_refused():
    assert "null byte" in refusal(ts.load_machine, "a\0b.toml")
    assert "null byte" in refusal(ts.load_model, "a\0b.json")


def test_a_model_in_capitals_is_the_one_that_was_meant():
    assert ts.load_model("8B") == ts.load_model("8b")
