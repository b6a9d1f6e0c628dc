"""The log of a run: every event comes back, over kills, resumes and numbers that are none."""

import errno
import json
import math

import pytest

from twinstream.log.metrics import (
    CheckpointMetrics,
    EvalMetrics,
    MetricsLog,
    StepMetrics,
    events_of_kind,
    read_metrics,
)
from twinstream.schedule.files import DocumentError


def step(number: int, loss: float = 2.0, **fields: object) -> StepMetrics:
    given: dict[str, object] = {
        "step": number, "loss": loss, "learning_rate": 1e-3, "tokens": 100, "targets": 90,
        "seconds": 0.5, "tokens_per_s": 200.0, "epoch": number / 10,
    }  # fmt: skip
    return StepMetrics.model_validate(given | fields)


def evaluation(number: int) -> EvalMetrics:
    return EvalMetrics(step=number, loss=1.0, perplexity=math.e, tokens=50, seconds=0.1)


def checkpoint(number: int) -> CheckpointMetrics:
    return CheckpointMetrics(
        step=number, path=f"checkpoints/{number}", bytes=2**40, seconds=3.0, device_held_s=0.25
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def written(path, *events):
    with MetricsLog(path) as log:
        for event in events:
            log.append(event)
    return list(events)


def test_events_come_back_as_they_were(path):
    events = written(
        path, step(1, grad_norm=0.5, predicted_tokens_per_s=210.0), evaluation(1), checkpoint(1),
        step(2),
    )  # fmt: skip
    assert read_metrics(path) == events
    assert events_of_kind(events, StepMetrics) == [events[0], events[3]]
    assert events_of_kind(events, EvalMetrics) == [events[1]]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step", "eval", "checkpoint", "step"]
    assert lines[0]["at"].endswith("+00:00")


def test_an_event_is_in_the_file_before_the_next(path):
    log = MetricsLog(path)
    log.append(step(1))
    assert [event.step for event in read_metrics(path)] == [1]
    log.close()


def test_what_is_no_finite_number_is_valid_json_and_comes_back(path):
    written(path, step(1, math.nan, grad_norm=math.inf), step(2, -math.inf))

    def refuse(constant):
        pytest.fail(f"{constant} is no JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    first, second = events_of_kind(read_metrics(path), StepMetrics)
    assert math.isnan(first.loss)
    assert first.grad_norm == math.inf
    assert second.loss == -math.inf


def test_a_text_in_place_of_a_number_is_no_number(path):
    written(path, step(1))
    path.write_text(path.read_text().replace('"loss":2.0', '"loss":"2.0"'))
    with pytest.raises(DocumentError, match=r"metrics\.jsonl:1: .*loss"):
        read_metrics(path)


@pytest.mark.parametrize("left", [1, 30, -1])
def test_a_line_that_a_kill_cut_off_is_left_out_and_then_cut_away(path, left):
    events = written(path, step(1), step(2))
    content = path.read_bytes()
    whole = content.index(b"\n") + 1
    path.write_bytes(content[:whole] + content[whole:][:left])
    assert read_metrics(path) == events[:1]
    again = written(path, step(3))
    assert read_metrics(path) == [events[0], *again]


def test_a_log_that_was_cut_off_in_its_first_line_begins_again(path):
    path.write_bytes(b'{"step":1,' + b" " * 200_000)
    events = written(path, step(1))
    assert read_metrics(path) == events


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "Invalid JSON"),
        ("", "Invalid JSON"),
        ('{"kind": "step", "step": 2}', "step.loss: Field required"),
        ('{"kind": "news", "step": 2}', "does not match any of the expected tags"),
        ("[1]", "Input should be an object"),
    ],
)
def test_any_other_bad_line_is_an_error_with_its_place(path, line, told):
    written(path, step(1))
    path.write_text(f"{path.read_text()}{line}\n{path.read_text()}")
    with pytest.raises(DocumentError) as error:
        read_metrics(path)
    assert f"{path}:2: no event of a run" in str(error.value)
    assert told in str(error.value)


def test_a_run_that_goes_on_has_each_step_once(path):
    events = written(path, step(1), step(2), evaluation(2), checkpoint(2), step(3), evaluation(3))
    with MetricsLog(path).truncated_after(2) as log:
        assert read_metrics(path) == events[:4]
        log.append(again := step(3, 1.5))
    assert read_metrics(path) == [*events[:4], again]


def test_going_on_from_the_last_step_changes_nothing(path):
    written(path, step(1), step(2))
    before = path.read_bytes(), path.stat().st_ino
    MetricsLog(path).truncated_after(2).close()
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_a_missing_log_and_a_folder_in_its_place_are_told(tmp_path):
    with pytest.raises(DocumentError, match=r"cannot read .*No such file"):
        read_metrics(tmp_path / "none.jsonl")
    with pytest.raises(DocumentError, match=r"cannot write .*directory"):
        MetricsLog(tmp_path)


def test_a_full_disk_leaves_the_events_before(path, monkeypatch):
    log = MetricsLog(path)
    log.append(event := step(1))

    class Full:
        def __init__(self, file):
            self._file, self.fileno = file, file.fileno
            self.truncate, self.close = file.truncate, file.close

        def write(self, line):
            if len(line) < 50:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(line[:-20])

    monkeypatch.setattr(log, "_file", Full(log._file))
    with pytest.raises(DocumentError, match="No space left on device; the events before are kept"):
        log.append(step(2))
    assert read_metrics(path) == [event]
    assert path.read_bytes().endswith(b"}\n")
    log.close()
