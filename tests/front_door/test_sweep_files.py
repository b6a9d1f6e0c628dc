"""A sweep's files: nothing half is left by a full disk, nothing old by the sweep before."""

import errno
import os
from pathlib import Path

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.study.answer import StudyError
from twinstream.study.sweep.rows import RowFile

SWEEP = """
[fixed]
model = "tiny"
machine = "cpu"
seq_len = 64
tokens_per_step = 256
policy = "streaming"
[axes]
device_mem = {sizes}
host_mem = ["80MiB", "90MiB"]
"""
ROW = {"key": "k", "status": "ok"}


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_row_that_a_full_disk_refuses_is_not_half_there(tmp_path: Path, monkeypatch):
    path = tmp_path / "rows.csv"
    file = RowFile(path, ["key", "status"])
    file.append(ROW)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StudyError, match=r"cannot write .*rows.csv: No space left.*kept"):
        file.append(ROW)
    assert path.read_bytes() == before


def test_a_row_written_in_pieces_is_whole(tmp_path: Path, monkeypatch):
    file = RowFile(tmp_path / "rows.csv", ["key", "status"])
    whole = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: whole(handle, content[:2]))
    file.append(ROW)
    assert (tmp_path / "rows.csv").read_text() == "key,status\nk,ok\n"


def test_a_sweep_on_a_full_disk_ends_with_one_message_and_without_an_empty_file(
    tmp_path: Path, monkeypatch
):
    config = tmp_path / "one.toml"
    config.write_text(SWEEP.format(sizes=["6MiB", "8MiB"]))
    monkeypatch.setattr(os, "fsync", full)
    message = error_of("sweep", config, "-o", tmp_path / "rows", "--jobs", 1)
    assert "No space left" in message
    assert [path.name for path in (tmp_path / "rows").iterdir()] == [".lock"]


def test_a_sweep_of_which_nothing_fits_fails_with_the_reason(tmp_path: Path):
    config, folder = tmp_path / "one.toml", tmp_path / "rows"
    config.write_text(SWEEP.format(sizes=["6MiB", "8MiB"]))
    assert call("sweep", config, "-o", folder, "--jobs", 1).code == 0
    config.write_text(SWEEP.format(sizes=["1MiB", "2MiB"]))
    outcome = call("sweep", config, "-o", folder, "--jobs", 1)
    assert outcome.code == 2
    assert "4 cells: 4 infeasible" in outcome.out
    assert "error: no cell could be planned; the first: " in outcome.err
    as_json = call("sweep", config, "-o", folder, "--jobs", 1, "--json")
    assert as_json.code == 2 and '"infeasible": 4' in as_json.out
