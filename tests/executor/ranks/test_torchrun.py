"""Ranks that others have started: by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

import subprocess
import sys

import pytest

from tests.contract.package_tree import REPO
from tests.executor.ranks.faulty import summing
from tests.executor.ranks.talks import value
from tests.helpers.ports import free_port
from tests.helpers.waiting import LONGEST_S
from twinstream.executor.ranks.rank_run import RankRun
from twinstream.schedule.errors import ArgumentError

SCRIPT = "tests.executor.ranks.under_torchrun"


def started(how: str, rank: int, port: int) -> subprocess.Popen[str]:
    told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)}  # fmt: skip
    command = [sys.executable, "-m", SCRIPT, how]
    return subprocess.Popen(
        ["env", *(f"{name}={one}" for name, one in told.items()), *command], cwd=REPO,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def said(how: str) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of both ranks."""
    port = free_port()
    both = [started(how, rank, port) for rank in range(2)]
    texts = [one.communicate(timeout=LONGEST_S) for one in both]
    return [(one.returncode, *text) for one, text in zip(both, texts, strict=True)]


def test_without_the_environment_it_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with (
        pytest.raises(ArgumentError, match=r"WORLD_SIZE, .* is not set: start ranks with torchrun"),
        RankRun.joined(summing(2)),
    ):
        raise AssertionError("nobody was met")


def test_both_run_twice_and_end_together():
    total = (value(0, "x", 1, 1000, "float32") + value(1, "x", 1, 1000, "float32")).sum().item()
    for rank, (code, out, _) in enumerate(said("well")):
        assert (code, out) == (0, f"rank {rank} has {total}\n")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("differs", "rank 1 has a schedule of hash "),
        ("runs on", "rank 1 has a run of passes 4, and rank 0 has 3: all ranks need the same"),
    ],
    ids=["schedules", "passes"],
)
def test_both_say_what_they_do_not_have_in_common(how, message):
    for code, out, error in said(how):
        assert code == 2
        assert out.startswith(message)
        assert out.count("\n") == 1
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("how", "message"),
    [("killed", "lost rank 1"), ("sleeps", "waited 4 s for rank 1")],
    ids=["killed", "sleeps"],
)
def test_who_is_left_says_whom_it_lost_and_in_which_op(how, message):
    port = free_port()
    both = [started(how, rank, port) for rank in range(2)]
    out, error = both[0].communicate(timeout=LONGEST_S)
    said = f"rank 0 (dp 0) {message} in op 'all_reduce.x.' (all_reduce) of pass 2\n"
    assert (both[0].returncode, out) == (2, said)
    assert "Traceback" not in error
    both[1].kill()
    both[1].communicate()


def test_torchrun_starts_them():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--master-port", str(free_port()), "-m", SCRIPT, "well"]  # fmt: skip
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr
    assert {line[:10] for line in done.stdout.splitlines()} == {"rank 0 has", "rank 1 has"}
