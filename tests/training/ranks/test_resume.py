"""A run that stops, or is killed, goes on to the same bits on as many ranks as there are then."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.waiting import ended, is_running
from tests.training.ranks.rank_runs import (
    STEPS,
    one_device,
    rank_options,
)
from tests.training.small_runs import Seen, state_files, trained
from twinstream.data.data_error import DataError
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.checkpoints import Checkpoint, CheckpointError, Checkpoints
from twinstream.training.run.run_folder import RunEndedError
from twinstream.training.run.steps import LossError, StepBatches, StepData
from twinstream.training.trainer import Trainer, TrainResult


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    state, losses = one_device(tmp_path / "one")
    wanted = rank_options(tmp_path / "b", ranks=4, pp=4)
    stopped, before = trained(wanted, stop_after=2)
    assert stopped.stopped and 2 <= stopped.step < STEPS
    fewer = wanted.model_copy(update={"ranks": 2, "pp": 2, "steps": STEPS})
    _, after = trained(fewer, resume=True)
    assert before.losses[: stopped.step] + after.losses == losses
    assert state_files(wanted.output, STEPS) == state


@pytest.mark.parametrize("ranks", [1, 4])
def test_four_ranks_go_on_on_one_and_four(tmp_path: Path, ranks: int) -> None:
    state, _ = one_device(tmp_path / "one")
    wanted = rank_options(tmp_path / "b", ranks=4, pp=4)
    trained(wanted, stop_after=2)
    again = wanted.model_copy(update={"ranks": ranks, "pp": ranks})
    trained(again, resume=True)
    assert state_files(wanted.output, STEPS) == state


def test_data_that_fails_and_a_last_checkpoint_that_does_end_ranks_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth step has no data: the third is kept; then the last one cannot be written."""
    wanted = rank_options(tmp_path, ranks=2, pp=2)
    step, write = StepBatches.step, Checkpoints.write

    def failing(self: StepBatches, number: int) -> StepData:
        if number == 4:
            raise DataError("rows.jsonl:17: no text")
        return step(self, number)

    def full(self: Checkpoints, *given: object) -> Checkpoint:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(StepBatches, "step", failing)
    with pytest.raises(RunEndedError, match=r"rows.jsonl:17.*up to step 3") as ended:
        trained(wanted)
    assert ended.value.result.step == 3
    monkeypatch.setattr(StepBatches, "step", step)
    monkeypatch.setattr(Checkpoints, "write", full)
    with pytest.raises(RunEndedError, match=r"the disk is full.*up to step 3") as ended:
        trained(wanted, resume=True)
    assert isinstance(ended.value.result, TrainResult) and ended.value.result.step == 3
    assert ended.value.result.measured_tokens_per_s is not None
    assert (wanted.output / "comparison.json").exists()
    monkeypatch.setattr(Checkpoints, "write", write)
    trained(wanted, resume=True)


def test_one_device_goes_on_on_two_ranks(tmp_path: Path) -> None:
    state, _ = one_device(tmp_path / "one")
    wanted = rank_options(tmp_path / "b")
    trained(wanted, stop_after=2)
    trained(wanted.model_copy(update={"ranks": 2, "pp": 2}), resume=True)
    assert state_files(wanted.output, STEPS) == state


def test_replicas_go_on_to_their_bits(tmp_path: Path) -> None:
    layout = {"ranks": 4, "pp": 2, "dp": 2}
    whole, straight = trained(rank_options(tmp_path / "a", **layout))
    wanted = rank_options(tmp_path / "b", **layout)
    _, before = trained(wanted, stop_after=2)
    _, after = trained(wanted, resume=True)
    done = STEPS - len(after.losses)
    assert before.losses[:done] + after.losses == straight.losses
    assert state_files(wanted.output, STEPS) == state_files(whole.folder, STEPS)


class Signals(Seen):
    """Sends a signal to a rank after a step."""

    def __init__(self, number: int, after: int) -> None:
        super().__init__()
        self._number, self._after = number, after
        self.ranks: Trainer | None = None
        self.pids: list[int] = []

    def on_step(self, metrics):  # type: ignore[no-untyped-def]
        super().on_step(metrics)
        if metrics.step == self._after:
            assert self.ranks is not None
            self.pids = list(self.ranks.pids)
            os.kill(self.pids[1], self._number)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"rank 1 was killed by signal 9 \(SIGKILL\)"),
        (signal.SIGSTOP, "rank 1 does not answer"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_all(tmp_path: Path, number: int, message: str) -> None:
    wanted = rank_options(tmp_path / "b", ranks=2, pp=2, save_every="1", keep=9)
    seen = Signals(number, 3)
    seen.ranks = Trainer(wanted, callbacks=[seen], timeout_s=3.0)
    with pytest.raises(TwinstreamError, match=message):
        seen.ranks.train()
    assert seen.pids and not any(is_running(pid) for pid in seen.pids)
    last = Checkpoints(wanted.output).latest()
    assert last is not None and last.state.step >= 2
    state, _ = one_device(tmp_path / "one")
    trained(wanted, resume=True)
    assert state_files(wanted.output, STEPS) == state


def test_a_loss_that_is_no_number_is_said_as_on_one_device(tmp_path: Path) -> None:
    wanted = rank_options(tmp_path / "b", ranks=2, pp=2, learning_rate=1e3, save_every="1")
    with pytest.raises(LossError, match=r"the loss of step .* is"):
        trained(wanted.model_copy(update={"weight_decay": 1e3, "warmup": "0", "steps": 50}))


def test_a_killed_trainer_leaves_no_rank_and_a_whole_checkpoint(tmp_path: Path) -> None:
    wanted = rank_options(tmp_path / "b", warmup="0", decay="constant")
    command = [
        sys.executable, "-m", "twinstream", "train", wanted.model, *wanted.data, "-o",
        str(wanted.output), "--ranks", "2", "--pp", "2", "--seq-len", "64", "--tokens-per-step",
        "512", "--chunk-tokens", "64", "--chunks-per-round", "1", "--steps", "100000",
        "--warmup", "0", "--decay", "constant", "--machine", "cpu", "--save-every", "1", "--keep",
        "1000000", "--data-workers", "0", "--learning-rate", "1e-2",
    ]  # fmt: skip
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    found = Checkpoints(wanted.output)
    while process.poll() is None and len(found.complete()) < 2:
        time.sleep(0.02)
    below = _descendants(process.pid)
    process.kill()
    process.wait()
    assert len(below) >= 3  # ranks, and who started them
    assert ended(below)
    last = found.latest()
    assert last is not None
    steps = last.state.step + 2
    trained(wanted.model_copy(update={"steps": steps}), resume=True)
    state, _ = one_device(tmp_path / "one", warmup="0", decay="constant", steps=steps)
    assert state_files(wanted.output, steps) == state


def _descendants(pid: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found
