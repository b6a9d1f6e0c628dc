"""`twinstream train` as people call it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import twinstream as ts
from tests.training.small_runs import SHAPE, options, write_config, write_rows
from twinstream.cli import app, main
from twinstream.training.options import read_options, write_options


def told(*arguments: str | Path) -> str:
    found = CliRunner().invoke(app, list(map(str, arguments)))
    assert found.exit_code == 0, found.output
    return found.output


def test_it_says_what_it_will_do_trains_and_says_what_it_came_to(tmp_path: Path) -> None:
    config, rows = write_config(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl")
    wanted = [config, f"{rows}=2", "-o", tmp_path / "run", *SHAPE, "--steps", "5"]
    before = told("train", *wanted, "--dry-run")
    for text in ("it fits", "tokens/s", "MFU", "5 steps", "limited by", "checkpoint", "optimizer"):
        assert text in before, text
    assert not (tmp_path / "run").exists()
    after = told("train", *wanted)
    for text in ("step 5/5  loss", "predicted", "measured", "checkpoint-5", "the device waited"):
        assert text in after, text
    assert (tmp_path / "run" / "model" / "config.json").exists()
    page = tmp_path / "page.html"
    told("report", tmp_path / "run", "-o", page)
    assert "learning rate" in page.read_text().lower()


def test_a_file_says_the_same_and_flags_override_it(tmp_path: Path) -> None:
    write_options(options(tmp_path), tmp_path)
    found = json.loads(told("train", tmp_path / "run.toml", "--steps", "3", "--json", "--dry-run"))
    assert found["num_steps"] == 3 and found["options"]["seq_len"] == 64
    told("train", tmp_path / "run.toml", "--steps", "3", "--no-tensorboard")
    kept = read_options(tmp_path / "run" / "run.toml")
    assert kept["steps"] == 3 and kept["tensorboard"] is False
    result = json.loads(told("train", tmp_path / "run.toml", "-o", tmp_path / "b", "--json"))
    assert result["step"] == 6 and result["signal"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL is missing"),
        (["tiny"], "DATA is missing"),
        (["tiny", "a.txt"], "-o DIR is missing"),
        (["tiny", "a.txt", "-o", "run", "--decay", "cosin"], "decay is 'cosin'"),
        (["tiny", "a.txt", "-o", "run", "--save-every", "soon"], "save_every 'soon' is neither"),
        (["none.toml"], "cannot read none.toml"),
        (["none.toml", "a.txt"], "give one"),
        (["-o", "none", "--resume"], "MODEL is missing"),
    ],
)
def test_wrong_words_are_one_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl").rename(tmp_path / "a.txt")
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_attention_that_is_not_deterministic_is_allowed_by_the_flag_that_the_message_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    wanted = ["train", "tiny", str(rows), "-o", str(tmp_path / "run"), "--machine", "h100"]
    wanted += ["--backend", "cpu", "--dtype", "bfloat16", "--attention", "sdpa_cudnn", "--dry-run"]
    with pytest.raises(SystemExit) as stopped:
        main(wanted)
    assert stopped.value.code == 2
    assert "allow it with --nondeterministic" in " ".join(capsys.readouterr().err.split())
    assert json.loads(told(*wanted, "--nondeterministic", "--json"))["options"]["nondeterministic"]


def test_from_python_it_is_a_call(tmp_path: Path) -> None:
    steps: list[int] = []

    class Counts(ts.Callback):
        def on_step(self, metrics: ts.StepMetrics) -> None:
            steps.append(metrics.step)

    result = ts.train(
        write_config(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl"), tmp_path / "run",
        callbacks=[Counts()], seq_len=64, tokens_per_step=256, steps=3, machine="cpu",
        backend="cpu", data_workers=0,
    )  # fmt: skip
    assert steps == [1, 2, 3] and result.step == 3 and result.loss is not None
    with pytest.raises(ts.TwinstreamError, match="there is no option learning_rat: did you mean"):
        ts.train("tiny", "a.txt", tmp_path / "x", learning_rat=1.0)
