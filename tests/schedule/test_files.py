"""Files are written whole, or not at all, whatever goes wrong on the way."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from twinstream.log.metrics import MetricsLog
from twinstream.schedule import files
from twinstream.schedule.files import DocumentError, only_writer, write_bytes, write_text

GOOD = "what was there\n"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.txt"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["fsync", "fchmod"])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    good: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException, where: str
) -> None:
    def failing(*_: object) -> None:
        raise problem

    monkeypatch.setattr(os, where, failing)
    with pytest.raises((DocumentError, KeyboardInterrupt)) as caught:
        write_text("new\n", good)
    if isinstance(problem, OSError):
        assert str(caught.value) == f"cannot write {good}: No space left on device"
    assert good.read_text() == GOOD
    assert list(good.parent.iterdir()) == [good]


def test_a_disk_that_fills_up_leaves_what_was_there(good: Path) -> None:
    script = (
        "import resource, sys\n"
        "from twinstream.schedule.files import DocumentError, write_bytes\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        "try:\n    write_bytes(b'x' * 5000, sys.argv[1])\n"
        "except DocumentError as error:\n    print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, good], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"cannot write {good}: File too large\n"
    assert good.read_text() == GOOD
    assert list(good.parent.iterdir()) == [good]


def test_of_many_writers_of_one_file_none_is_disturbed(tmp_path: Path) -> None:
    path, errors, seen = tmp_path / "shared.bin", list[Exception](), set[bytes]()
    contents = [bytes([n]) * 50_000 for n in range(4)]
    write_bytes(contents[0], path)

    def write(content: bytes) -> None:
        try:
            for _ in range(20):
                write_bytes(content, path)
                seen.add(path.read_bytes())
        except DocumentError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert seen <= set(contents)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_permissions_stay(good: Path) -> None:
    good.chmod(0o640)
    link = good.with_name("link")
    link.symlink_to(good)
    write_text("new\n", link)
    assert link.is_symlink() and good.read_text() == "new\n"
    assert stat.S_IMODE(good.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_text("", mine)
    other.touch()
    assert mine.stat().st_mode == other.stat().st_mode


def test_a_name_of_the_greatest_length_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_text(GOOD, path)
    assert path.read_text() == GOOD


@pytest.mark.parametrize("name", ["with\0null", "n" * 256, "no/folder"])
def test_what_can_be_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DocumentError, match="cannot write"):
        write_text(GOOD, tmp_path / name)


def test_a_text_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    files.write_text("a\udcffb", tmp_path / "text")
    assert (tmp_path / "text").read_text() == "a?b"


def test_a_lock_and_a_log_that_are_links_leave_alone_what_they_lead_to(
    tmp_path: Path, good: Path
) -> None:
    (tmp_path / "run").mkdir()
    for name in (files.LOCK, "metrics.jsonl"):
        (tmp_path / "run" / name).symlink_to(good)
    with pytest.raises(DocumentError, match="symbolic link"), only_writer(tmp_path / "run"):
        pass
    with pytest.raises(DocumentError, match="symbolic link"):
        MetricsLog(tmp_path / "run" / "metrics.jsonl")
    assert good.read_text() == GOOD
