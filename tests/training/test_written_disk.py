"""Runs that keep what they train on a drive: the bits of runs in memory, whatever happens."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.training.killed_runs import forked, killed, wait
from tests.training.small_runs import options, state_files, there_and_back, trained, write_config
from twinstream.executor.weights.errors import WeightsError
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document
from twinstream.training.checkpoints import Checkpoints
from twinstream.training.options import TrainOptions
from twinstream.training.trainer import Trainer, TrainResult

CAPS = (("600KiB", "500KiB"), ("600KiB", "800KiB"))


def plain(folder: Path, run: str, **given: Any) -> TrainOptions:
    """A run of six narrow layers in memory; its cut is fixed, which decides the bits."""
    model = str(write_config(folder / "model", num_layers=6))
    fixed = {"dtype": "float32", "chunk_tokens": 128, "chunks_per_round": 1, "save_every": "2"}
    wanted = options(folder, model=model, **(fixed | {"steps": 4} | given))
    return wanted.model_copy(update={"output": folder / run})


def with_drive(wanted: TrainOptions, place: Path, caps: tuple[str, str] = CAPS[0]) -> TrainOptions:
    """The same beside a drive, with too little host memory."""
    place.mkdir(exist_ok=True)
    return wanted.model_copy(
        update={
            "disk": place, "disk_bandwidth": "1GB/s,500MB/s", "device_mem": caps[0],
            "host_mem": caps[1],
        }
    )  # fmt: skip


def num_writes(result: TrainResult) -> int:
    plan = read_document(Schedule, result.folder / "plan.json")
    return sum(op.stream.queue == "disk_write" for op in plan.only.ops)


@pytest.mark.parametrize("given", [{"max_grad_norm": 0.0}, {"optimizer_state": "8bit"}])
def test_runs_have_the_bits_of_runs_in_memory(tmp_path: Path, given: dict[str, Any]) -> None:
    """With clipping too, whose updates may begin the next pass; and with evaluations."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("THE LAZY DOG\n\nJUMPS OVER A FOX")
    given = given | {"eval_data": (str(held_out),)}
    whole, straight = trained(plain(tmp_path, "whole", **given))
    for number, caps in enumerate(CAPS):
        wanted = plain(tmp_path, f"disk-{number}", **given)
        result, seen = trained(with_drive(wanted, tmp_path / "drive", caps))
        assert num_writes(result) > 10, caps
        assert seen.losses == straight.losses
        assert [one.loss for one in seen.evals] == [one.loss for one in straight.evals]
        assert state_files(result.folder, 4) == state_files(whole.folder, 4)
    assert not list((tmp_path / "drive").iterdir())


def test_a_run_goes_on_from_a_drive_to_none_and_back(tmp_path: Path) -> None:
    whole, straight = trained(plain(tmp_path, "whole", steps=8))
    memory = plain(tmp_path, "run", steps=8)
    disk = with_drive(memory, tmp_path / "drive")
    result, losses = there_and_back(disk, memory)
    assert losses == straight.losses
    assert state_files(result.folder, 8) == state_files(whole.folder, 8)


def test_a_kill_leaves_nothing_on_the_drive_and_the_run_goes_on(tmp_path: Path) -> None:
    whole, _ = trained(plain(tmp_path, "whole", steps=24, save_every="never"))
    wanted = with_drive(plain(tmp_path, "run", steps=24, save_every="1"), tmp_path / "drive")
    assert killed(wanted, 6, after_s=0.0)
    assert not list((tmp_path / "drive").iterdir())
    done = Checkpoints(wanted.output).complete()
    assert done and done[-1].name != "checkpoint-24"
    leftover = tmp_path / "drive" / "twinstream-state-of_a_kill"  # before it had lost its name
    leftover.touch()
    assert wait(forked(lambda: trained(wanted, resume=True))) == 0
    assert not leftover.exists()
    assert state_files(wanted.output, 24) == state_files(whole.folder, 24)


def test_a_drive_without_room_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightsError, match=r"has no room for a file of .* Make room") as refused:
        trained(with_drive(plain(tmp_path, "run"), tmp_path / "drive"))
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "drive").iterdir())


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_the_drive_ends_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """After some steps, in whatever thread it comes."""
    whole, straight = trained(plain(tmp_path, "whole", steps=8))
    wanted = with_drive(plain(tmp_path, "run", steps=8), tmp_path / "drive")
    failing = _Failing(getattr(os, call))
    monkeypatch.setattr(os, call, failing)
    trainer = Trainer(wanted, callbacks=[])
    failing.after = _AfterCheckpoint(wanted.output)
    with pytest.raises(WeightsError, match="The run has stopped, and its checkpoints") as ended:
        trainer.train()
    assert "\n" not in str(ended.value)
    monkeypatch.undo()
    (*_, last) = Checkpoints(wanted.output).complete()
    assert last.name in ("checkpoint-2", "checkpoint-4", "checkpoint-6")
    assert not list((tmp_path / "drive").iterdir())
    result, rest = trained(wanted, resume=True)
    assert straight.losses[8 - len(rest.losses) :] == rest.losses
    assert state_files(result.folder, 8) == state_files(whole.folder, 8)


class _AfterCheckpoint:
    """Whether a run has one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> bool:
        return bool(Checkpoints(self._folder).complete())


class _Failing:
    """A call of the system that fails once something has happened."""

    def __init__(self, real: Any) -> None:
        self._real, self.after = real, lambda: False

    def __call__(self, *given: Any) -> int:
        if self.after():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found: int = self._real(*given)
        return found
