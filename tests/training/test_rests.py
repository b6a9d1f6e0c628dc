"""What is done between steps: when it is due, and what happens where a checkpoint fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.small_runs import options, write_rows
from twinstream.log.metrics import AnyEvent, CheckpointMetrics, EvalMetrics
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.checkpoints import CheckpointError, Checkpoints
from twinstream.training.preparing import Prepared
from twinstream.training.run.batches import StepBatches
from twinstream.training.run.recorder import StepRecorder
from twinstream.training.run.rests import AtRest, Rests, Underway
from twinstream.training.run.run_folder import RunFolder
from twinstream.training.trainer import Trainer

EVALUATION = EvalMetrics(step=2, loss=1.5, perplexity=4.5, tokens=8, seconds=0.1)


class GoneError(TwinstreamError):
    """Nothing can go on after it."""


class Run:
    """A prepared run that rests where it is told to."""

    def __init__(self, folder: Path, **given: Any) -> None:
        wanted = options(folder, **given)
        self.prepared: Prepared = Trainer(wanted).prepare()
        self.folder = wanted.output
        self.events: list[AnyEvent] = []
        self.lines: list[str] = []
        place = RunFolder(wanted, resume=False)
        place.identify(self.prepared)
        self.rests = Rests(
            self.prepared, place, self.events.append, self.lines.append, fatal=(GoneError,)
        )

    def rest(
        self,
        step: int,
        write: Any,
        *,
        is_last: bool = False,
        evaluates: bool = True,
        evaluate: Callable[[], EvalMetrics] = lambda: EVALUATION,
    ) -> None:
        plan, recipe = self.prepared.plan, self.prepared.recipe
        with plan.chunks(self.prepared.data, 0) as stream:
            batches = StepBatches(stream, plan.chunks_per_step, step, plan.pieces)
            recorder = StepRecorder(
                batches, self.prepared.rate, predicted_s=1.0, clips=False, tokens=99,
                epoch_tokens=1, on_step=lambda metrics: None,
            )  # fmt: skip
            run = Underway(recipe, plan.workload, batches, recorder)
            self.rests.rest(AtRest(step, is_last, evaluate if evaluates else None, write), run)


def written(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"12345")


def test_a_checkpoint_says_how_the_run_goes_on_from_it(tmp_path: Path) -> None:
    rows = (str(write_rows(tmp_path / "held_out.jsonl", 20)),)
    run = Run(tmp_path, save_every="2", eval_data=rows)
    assert [step for step in range(1, 6) if run.rests.is_due(step)] == [2, 4]
    run.rest(2, written)
    saved = run.rests.checkpoint
    assert saved is not None and (saved.state.step, saved.state.tokens) == (2, 99)
    assert saved.state.eval_loss == 1.5 == run.rests.eval_loss
    assert Checkpoints(run.folder).latest().state == saved.state  # type: ignore[union-attr]
    assert saved.state.recipe == run.prepared.recipe
    assert [type(event) for event in run.events] == [CheckpointMetrics, EvalMetrics]
    assert run.events[0].bytes == 5
    run.rest(2, pytest.fail, is_last=True)  # all of it is there
    assert len(run.events) == 2
    run.rest(3, pytest.fail)  # nothing is due
    assert len(run.events) == 2


def test_an_evaluation_that_fails_costs_no_checkpoint(tmp_path: Path) -> None:
    def no_memory() -> EvalMetrics:
        raise GoneError("out of memory")

    rows = (str(write_rows(tmp_path / "held_out.jsonl", 20)),)
    run = Run(tmp_path, save_every="2", eval_data=rows)
    with pytest.raises(GoneError):
        run.rest(2, written, evaluate=no_memory)
    latest = Checkpoints(run.folder).latest()
    assert latest is not None and (latest.state.step, latest.state.eval_loss) == (2, None)


def test_a_last_checkpoint_that_fails_costs_no_evaluation(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise CheckpointError("the disk is full")

    run = Run(tmp_path, save_every="never")
    run.rest(6, full, is_last=True)
    assert isinstance(run.rests.failure, CheckpointError)
    assert run.events == [EVALUATION]


def test_evaluations_come_as_often_as_is_said(tmp_path: Path) -> None:
    rows = (str(write_rows(tmp_path / "held_out.jsonl", 20)),)
    run = Run(tmp_path, save_every="never", eval_data=rows, eval_every=3)
    assert [step for step in range(1, 7) if run.rests.is_due(step)] == [3, 6]
    run.rest(3, pytest.fail)
    assert run.events == [EVALUATION]
    assert run.rests.checkpoint is None


def test_a_step_of_another_evaluation_has_no_loss_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, save_every="4")
    run.rests.eval_loss = 1.5  # of step 2
    run.rest(4, written, evaluates=False)
    assert run.rests.checkpoint is not None
    assert run.rests.checkpoint.state.eval_loss is None


def test_training_goes_on_without_a_checkpoint_but_for_the_last(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise CheckpointError("the disk is full")

    run = Run(tmp_path, save_every="2")
    run.rest(2, full, evaluates=False)
    tokens = tmp_path / "run" / "tokens"
    assert run.lines == [
        f"{tokens} is removed, to make room for a checkpoint: the disk is full",
        "no checkpoint after step 2, training goes on: the disk is full",
    ]
    assert run.events == [] and run.rests.checkpoint is None and run.rests.failure is None
    assert not list(tokens.glob("**/*.tokens"))
    run.rest(6, full, is_last=True, evaluates=False)
    assert isinstance(run.rests.failure, CheckpointError)


def test_the_cache_of_tokens_gives_way_to_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, save_every="2")
    tokens = tmp_path / "run" / "tokens" / "ab.tokens"
    tokens.parent.mkdir()
    tokens.touch()

    def full_until_it_is_gone(folder: Path) -> None:
        if tokens.exists():
            raise CheckpointError("the disk is full")
        written(folder)

    run.rest(4, full_until_it_is_gone, evaluates=False)
    assert run.rests.checkpoint is not None and run.rests.failure is None


def test_an_error_of_the_run_itself_ends_it(tmp_path: Path) -> None:
    def gone(folder: Path) -> None:
        raise GoneError

    run = Run(tmp_path, save_every="2")
    with pytest.raises(GoneError):
        run.rest(2, gone, evaluates=False)
    assert run.lines == []
