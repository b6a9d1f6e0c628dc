"""The campaign's short `twinstream train`."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.gpu.run import train_job
from benchmarks.gpu.run.train_job import trained
from twinstream.executor.probe.process import JobFailed, JobTimeout


def run_that_logs(*events):
    """In place of the command: writes these events into the run's folder."""

    def run(command, limit_s, names, log):
        words = list(command)
        assert words[words.index("--eval-every") - 2 :][:2] == ["--steps", "2"]
        lines = Path(words[words.index("train") + 2]).read_text(encoding="utf-8").splitlines()
        assert sum(len(json.loads(line)["text"].encode()) for line in lines) >= 10_000
        folder = Path(words[words.index("-o") + 1])
        folder.mkdir()
        told = "".join(json.dumps(event) + "\n" for event in events)
        (folder / "metrics.jsonl").write_text(told)
        return "", 0

    return run


def step(number, loss=5.0, **more):
    given = {"step": number, "kind": "step", "loss": loss, "learning_rate": 1.0, "tokens": 100}
    given |= {"targets": 90, "seconds": 0.5, "tokens_per_s": 200.0, "grad_norm": 1.0}
    return given | more


EVAL = {"step": 1, "kind": "eval", "loss": 5.5, "perplexity": 1.0, "tokens": 9, "seconds": 1.0}
SAVED = {"step": 2, "kind": "checkpoint", "path": "c", "bytes": 7, "seconds": 0.25}


def test_a_short_run_is_told_by_its_log(monkeypatch):
    events = (step(1, seconds=9.0), EVAL, step(2, loss=4.0), EVAL | {"loss": 4.5}, SAVED)
    monkeypatch.setattr(train_job, "run_within", run_that_logs(*events))
    found = trained("tiny", "cpu", 10.0)
    assert (found.losses, found.eval_losses) == ((5.0, 4.0), (5.5, 4.5))
    assert found.tokens_per_s == 200.0, "of the later half of the steps"
    assert (found.checkpoint_bytes, found.checkpoint_s) == (7, 0.25)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((step(1), EVAL, SAVED), "1 steps, 1 evaluations and 1 checkpoints"),
        ((step(1), EVAL, EVAL), "2 evaluations and 0 checkpoints"),
        ((step(1, loss="NaN"), EVAL, EVAL, SAVED), r"losses are \[nan\]"),
        ((step(1, grad_norm=None), EVAL, EVAL, SAVED), "clipped nothing"),
    ],
)
def test_a_run_that_lacks_something_or_is_wrong_has_failed(events, message, monkeypatch):
    monkeypatch.setattr(train_job, "run_within", run_that_logs(*events))
    with pytest.raises(JobFailed, match=message):
        trained("tiny", "cpu", 10.0)


def test_a_run_that_breaks_or_hangs_is_a_sentence(monkeypatch):
    told = "Traceback\n  line\nValueError: seven"
    monkeypatch.setattr(train_job, "run_within", lambda *_: (told, 1))
    with pytest.raises(JobFailed, match="ended with code 1: ValueError: seven") as caught:
        trained("tiny", "cpu", 10.0)
    assert caught.value.details == told
    monkeypatch.setattr(train_job, "run_within", lambda *_: ("", None))
    with pytest.raises(JobTimeout, match="had not ended after 10 s"):
        trained("tiny", "cpu", 10.0)


def test_the_real_command_clips_evaluates_and_saves():
    found = trained("tiny", "cpu", 120.0)
    assert len(found.losses) == len(found.eval_losses) == 2
    assert all(map(math.isfinite, (*found.losses, *found.eval_losses)))
    assert found.checkpoint_bytes > 10**6
