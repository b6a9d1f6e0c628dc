"""What is no regular file, and words that no file can have, end in one message."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.samples import data_of, tokenizer_folder
from tests.training.small_runs import SHAPE, write_config, write_rows
from twinstream.cli import main
from twinstream.data.data_error import DataError
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.safetensors_header import read_header

LONG = "n" * 300


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, arguments)))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_and_devices_are_no_files(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None is waited for, and none is read without end."""
    (tmp_path / "m").mkdir()
    for name in ("m/config.json", "plan.json", "machine.toml", "run.toml", "model.safetensors"):
        make(tmp_path / name)
    for arguments in (
        ["plan", "--model", tmp_path / "m", "--machine", "h100", "--seq-len", "64"],
        ["plan", "--model", "tiny", "--machine", tmp_path / "machine.toml", "--seq-len", "64"],
        ["verify", tmp_path / "plan.json"],
        ["train", tmp_path / "run.toml"],
    ):
        assert "it is no regular file" in error_of(capsys, *arguments)
    with pytest.raises(WeightsError, match="it is no regular file"):
        read_header(tmp_path / "model.safetensors")


def test_words_that_no_file_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 20)
    wanted = ["train", write_config(tmp_path / "m"), rows, *SHAPE, "-o", tmp_path / LONG]
    assert "cannot be the folder of a run: File name too long" in error_of(capsys, *wanted)
    said = error_of(capsys, "train", "-o", tmp_path / LONG, "--resume")
    assert "has no run to go on with" in said
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text(f'model = "a\\u0000b"\ndata = ["{rows}"]\n')
    told = error_of(capsys, "train", "-o", run, "--resume")
    assert "run.toml: model is" in told and "no name has a null byte" in told
    (run / "run.toml").write_text("a = " + "[" * 5000)
    for given in (["-o", run, "--resume"], [run / "run.toml"]):
        assert "is not valid TOML: arrays or tables are nested" in error_of(capsys, "train", *given)
    (run / "run.toml").write_text("a = " + "9" * 5000)
    assert "is not valid TOML: Exceeds the limit" in error_of(capsys, "train", run / "run.toml")


def test_ids_that_need_more_than_31_bits_are_refused(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    found["model"]["vocab"]["a"] = 2**31
    path.write_text(json.dumps(found))
    write_rows(tmp_path / "rows.jsonl", 20)
    with pytest.raises(DataError, match=f"token id {2**31}, and ids are below {2**31}"):
        data_of(tmp_path / "rows.jsonl", folder)
