"""What is done between steps: when it is due, and what happens where a checkpoint fails."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.small_runs import options, write_rows
from twinstream.executor.ranks.errors import RanksError
from twinstream.log.metrics import AnyEvent, CheckpointMetrics, EvalMetrics
from twinstream.training.checkpoints import CheckpointError, Checkpoints
from twinstream.training.preparing import Prepared
from twinstream.training.run.hooks import RunProgress, StepHooks
from twinstream.training.run.run_folder import TrainingFolder
from twinstream.training.run.steps import StepBatches, StepRecorder
from twinstream.training.trainer import Trainer

EVALUATION = EvalMetrics(step=2, loss=1.5, perplexity=4.5, tokens=8, seconds=0.1)


class Run:
    """A prepared run that pauses where it is told to."""

    def __init__(self, folder: Path, **given: Any) -> None:
        wanted = options(folder, **given)
        self.prepared: Prepared = Trainer(wanted).prepare()
        self.folder = wanted.output
        self.events: list[AnyEvent] = []
        self.lines: list[str] = []
        place = TrainingFolder(wanted, resume=False)
        place.identify(self.prepared)
        self.hooks = StepHooks(self.prepared, place, self.events.append, self.lines.append)

    def save(self, step: int, write: Any, *, is_last: bool = False) -> None:
        plan, recipe = self.prepared.plan, self.prepared.recipe
        with plan.chunks(self.prepared.data, 0) as stream:
            batches = StepBatches(stream, plan.chunks_per_step, step, plan.pieces)
            recorder = StepRecorder(
                batches, self.prepared.rate, plan=plan, reference=None, tokens=99,
                epoch_tokens=1, on_step=lambda metrics: None,
            )  # fmt: skip
            progress = RunProgress(recipe, plan.workload, batches, recorder)
            self.hooks.write_checkpoint(step, progress, write, is_last=is_last)

    def evaluate(self, step: int) -> None:
        self.hooks.evaluate(step, lambda step: EVALUATION)


def written(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"12345")


def test_a_checkpoint_says_how_the_run_goes_on_from_it(tmp_path: Path) -> None:
    rows = (str(write_rows(tmp_path / "held_out.jsonl", 20)),)
    run = Run(tmp_path, save_every="2", eval_data=rows)
    due = [run.hooks.due(step, is_last=step == 5) for step in range(1, 6)]
    assert due == [(at, at) for at in (False, True, False, True, True)]
    run.save(2, written)
    run.evaluate(2)
    saved = run.hooks.checkpoint
    assert saved is not None and (saved.state.step, saved.state.tokens) == (2, 99)
    assert saved.state.eval_loss == 1.5 == run.hooks.eval_loss
    assert Checkpoints(run.folder).latest().state == saved.state  # type: ignore[union-attr]
    assert saved.state.recipe == run.prepared.recipe
    assert [type(event) for event in run.events] == [CheckpointMetrics, EvalMetrics]
    assert run.events[0].bytes == 5
    run.save(2, pytest.fail, is_last=True)  # all of it is there
    run.evaluate(2)
    assert len(run.events) == 2


def test_evaluations_come_as_often_as_is_said(tmp_path: Path) -> None:
    rows = (str(write_rows(tmp_path / "held_out.jsonl", 20)),)
    run = Run(tmp_path, save_every="never", eval_data=rows, eval_every=3)
    due = [run.hooks.due(step, is_last=step == 7) for step in range(1, 8)]
    assert due == [(step == 7, step in (3, 6, 7)) for step in range(1, 8)]
    without = Run(tmp_path / "without", save_every="2")
    assert without.hooks.due(2, is_last=True) == (True, False)


def test_a_step_of_another_evaluation_has_no_loss_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, save_every="4")
    run.hooks.eval_loss = 1.5  # of step 2
    run.save(4, written)
    assert run.hooks.checkpoint is not None
    assert run.hooks.checkpoint.state.eval_loss is None


def test_training_goes_on_without_a_checkpoint_but_for_the_last(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise CheckpointError("the disk is full")

    run = Run(tmp_path, save_every="2")
    run.save(2, full)
    tokens = tmp_path / "run" / "tokens"
    assert run.lines == [
        f"{tokens} is removed, to make room for a checkpoint: the disk is full",
        "no checkpoint after step 2, training goes on: the disk is full",
    ]
    assert run.events == [] and run.hooks.checkpoint is None and run.hooks.failure is None
    assert not list(tokens.glob("**/*.tokens"))
    run.save(6, full, is_last=True)
    assert isinstance(run.hooks.failure, CheckpointError)
    run.evaluate(6)  # which the checkpoint that failed does not cost
    assert run.events == [EVALUATION]


def test_the_cache_of_tokens_gives_way_to_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, save_every="2")
    tokens = tmp_path / "run" / "tokens" / "ab.tokens"
    tokens.parent.mkdir()
    tokens.touch()

    def full_until_it_is_gone(folder: Path) -> None:
        if tokens.exists():
            raise CheckpointError("the disk is full")
        written(folder)

    run.save(4, full_until_it_is_gone)
    assert run.hooks.checkpoint is not None and run.hooks.failure is None


def test_an_error_of_a_rank_ends_the_run(tmp_path: Path) -> None:
    def gone(folder: Path) -> None:
        raise RanksError("rank 1 does not answer")

    run = Run(tmp_path, save_every="2")
    with pytest.raises(RanksError):
        run.save(2, gone)
    assert run.lines == []
