"""`twinstream train` as people call it."""

import json
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from typer.testing import CliRunner

import twinstream as ts
from tests.data.samples import tokenizer_folder
from tests.training.small_runs import SHAPE, options, write_config, write_rows
from twinstream.cli import app, main
from twinstream.commands.runs import train as training
from twinstream.executor.backends.cpu import CpuBackend
from twinstream.log.metrics import StepMetrics, events_of_kind, read_metrics
from twinstream.schedule.sizes import parse_bytes
from twinstream.training.options import read_options, write_options


def told(*arguments: str | Path) -> str:
    found = CliRunner().invoke(app, list(map(str, arguments)))
    assert found.exit_code == 0, found.output
    return found.output


def test_it_says_what_it_will_do_trains_and_says_what_it_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that other programs use, which is said beside the error."""
    monkeypatch.setattr(CpuBackend, "processor_share", 0.4)
    config, rows = write_config(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl")
    wanted = [config, f"{rows}=2", "-o", tmp_path / "run", *SHAPE, "--steps", "5"]
    before = told("train", *wanted, "--dry-run")
    for text in ("it fits", "tokens/s", "MFU", "5 steps", "limited by", "checkpoint", "optimizer"):
        assert text in before, text
    assert not (tmp_path / "run").exists()
    after = told("train", *wanted)
    for text in ("step 5/5  loss", "predicted", "measured", "checkpoint-5", "the device waited"):
        assert text in after, text
    busy = "The machine was busy: kernels had a core for 40% of their time"
    assert busy in after
    assert (tmp_path / "run" / "model" / "config.json").exists()
    page = tmp_path / "page.html"
    told("report", tmp_path / "run", "-o", page)
    assert "learning rate" in page.read_text().lower() and busy in page.read_text()
    words = " ".join(after.split())
    size = r"([\d.]+ [KMG]iB)"
    parts = rf"memory {size} of this machine's: {size} planned, {size} interpreter.* {size} while"
    shown = re.search(parts, words)
    took = re.search(rf"process took {size} of the host's .* peak, {size} were predicted", words)
    assert shown is not None and took is not None
    whole, *addends = (parse_bytes(one) for one in shown.groups())
    # sizes are shown in two or more digits: of 1.6 and 1.8 GiB the last is 3 % each
    assert abs(whole - sum(addends)) < 0.07 * whole and addends[1] > 100 * 2**20
    assert took[2] == shown[1]


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
        (["Qwen/Qwen3-8B", "a.txt", "-o", "run"], "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B"),
        (["tiny", "a.txt", "-o", "a.txt/run"], "cannot make the folder a.txt/run"),
        (["tiny", "a.txt", "-o", "/proc/run"], "cannot make the folder /proc/run"),
        (["tiny", "a.txt", "-o", "r" * 300], "cannot be the folder of a run: File name too long"),
        (["tiny", "a.txt"], "-o DIR is missing"),
        (["tiny", "a.txt", "-o", "run", "--decay", "cosin"], "decay is 'cosin'"),
        (["tiny", "a.txt", "-o", "run", "--save-every", "soon"], "save_every 'soon' is neither"),
        (["tiny", "a.txt", "-o", "r", "--steps", "3", "--epochs", "1"], "leave one out"),
        (["none.toml"], "cannot read none.toml"),
        (["none.toml", "a.txt"], "give one"),
        (["-o", "none", "--resume"], "none has no run to go on with"),
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


def asked(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> ts.TrainOptions:
    """What a command line asks of the trainer."""
    found: list[ts.TrainOptions] = []

    def stop(wanted: ts.TrainOptions, **_: object) -> None:
        found.append(wanted)
        raise ts.TwinstreamError("enough")

    monkeypatch.setattr(training, "Trainer", stop)
    monkeypatch.setattr(training, "on_all_gpus", lambda wanted, tell: wanted)
    with pytest.raises(ts.TwinstreamError, match="enough"):
        app(["train", *arguments], standalone_mode=False)
    return found[0]


def test_every_choice_of_every_option_can_be_made_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = 0
    for name, field in ts.TrainOptions.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        for choice in (c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)):
            flag = f"--{name.replace('_', '-')}"
            wanted = asked(["tiny", "a.txt", "-o", "run", flag, str(choice)], monkeypatch)
            assert getattr(wanted, name) == choice
            tried += 1
    assert tried > 20


def test_names_that_people_know_say_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["tiny", "a.txt", "-o", "run", "--seq-len", "64", "--lr", "1e-3", "--batch-size", "8"]
    wanted = asked(given, monkeypatch)
    assert (wanted.learning_rate, wanted.tokens_per_step, wanted.batch_size) == (1e-3, 512, None)
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "tiny"\ndata = ["a.txt"]\noutput = "run"\nseq_len = 64\nlr = 0.5\nbatch_size = 2\n'
    )
    above = asked([str(file), "--learning-rate", "0.1", "--tokens-per-step", "64"], monkeypatch)
    assert (above.learning_rate, above.tokens_per_step) == (0.1, 64)
    with pytest.raises(ts.TwinstreamError, match="lr and learning_rate are the same: give one"):
        ts.train("tiny", "a.txt", "run", lr=1.0, learning_rate=1.0)
    with pytest.raises(ts.TwinstreamError, match="batch_size 2 is 128 tokens a step, and tokens_"):
        ts.train("tiny", "a.txt", "run", seq_len=64, batch_size=2, tokens_per_step=64)


def test_a_dry_run_needs_neither_weights_nor_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_config(tmp_path / "m", vocab_size=512).parent
    tokenizer_folder(folder)
    rows = write_rows(tmp_path / "rows.jsonl")
    before = sorted(tmp_path.rglob("*"))
    dry = " ".join(told("train", folder, rows, *SHAPE, "--dry-run").split())
    assert "whose weights are not there yet" in dry and "it fits" in dry
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ts.TwinstreamError, match="has neither"):
        ts.train(folder, rows, tmp_path / "run", seq_len=64)


def test_columns_are_told_by_a_flag_a_table_or_a_dictionary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flag = asked(["tiny", "a.txt", "-o", "run", "--columns", "prompt=ask,completion=said"],
                 monkeypatch)  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "tiny"\ndata = ["a.txt"]\noutput = "run"\n'
        '[columns]\nprompt = "ask"\ncompletion = "said"\n'
    )
    assert flag.columns == asked([str(file)], monkeypatch).columns == "prompt=ask,completion=said"
    for wrong, why in (("promt=ask", "'promt' is nothing"), ("text", "is no NAME=COLUMN")):
        with pytest.raises(ts.TwinstreamError, match=f"columns.*{why}"):
            ts.train("tiny", "a.txt", "run", columns=wrong)
    with pytest.raises(ts.TwinstreamError, match="the row has no `5`"):
        rows = str(write_rows(tmp_path / "rows.jsonl"))
        ts.train("tiny", rows, tmp_path / "run", columns={"text": 5}, machine="cpu")


def test_other_caps_have_the_same_steps_with_the_flags_that_the_screen_names(
    tmp_path: Path,
) -> None:
    """Each cap chooses another chunk otherwise, which packs other documents."""
    model, rows = write_config(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl")
    common = ("train", model, rows, "--seq-len", "64", "--tokens-per-step", "512", "--steps", 2,
              "--machine", "cpu", "--backend", "cpu", "--data-workers", 0)  # fmt: skip
    wide = told(*common, "-o", tmp_path / "wide")
    flags = " ".join(wide.split()).split("the same steps with ")[1].split()[:6]
    assert flags[:2] == ["--tokens-per-step", "512"] and flags[2] == "--chunk-tokens"
    caps = ("--device-mem", "3MiB", "--host-mem", "64MiB")
    told(*common, *caps, *flags[2:], "-o", tmp_path / "same")
    other = told(*common, *caps, "--chunk-tokens", 64, "-o", tmp_path / "other")
    assert "other caps" in other
    losses = {
        name: [
            one.loss
            for one in events_of_kind(read_metrics(tmp_path / name / "metrics.jsonl"), StepMetrics)
        ]
        for name in ("wide", "same", "other")
    }
    assert losses["wide"] == losses["same"] != losses["other"]
