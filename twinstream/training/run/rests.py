"""What is done between the steps of a run, while nothing runs: evaluations and checkpoints."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter

from twinstream.log.metrics import AnyEvent, CheckpointMetrics, EvalMetrics
from twinstream.models.recipe import Recipe
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload
from twinstream.training.amounts import every
from twinstream.training.checkpoints import DataPosition, TrainingState
from twinstream.training.options import fixed_options
from twinstream.training.preparing import Opened, Tell
from twinstream.training.run.batches import StepBatches
from twinstream.training.run.recorder import StepRecorder
from twinstream.training.run.run_folder import RunFolder


@dataclass(frozen=True)
class Underway:
    """What trains by one plan: how, and how far it has come in its data."""

    recipe: Recipe
    workload: Workload
    batches: StepBatches
    recorder: StepRecorder


@dataclass(frozen=True)
class AtRest:
    """A step after which nothing runs, and what can be done then.

    `evaluate` is None where there is no data for it; `write_tensors` writes the state to a folder.
    """

    step: int
    is_last: bool
    evaluate: Callable[[], EvalMetrics] | None
    write_tensors: Callable[[Path], None]


class Rests:
    """When a run rests, and what it does then.

    Args:
        fatal: errors of writing a checkpoint after which training cannot go on.

    Attributes:
        checkpoint: the last that is complete; at first the folder's.
        failure: why the run ends early, or its last checkpoint could not be written.
        eval_loss: of the last evaluation; None before the first.
    """

    def __init__(
        self,
        prepared: Opened,
        folder: RunFolder,
        record: Callable[[AnyEvent], None],
        tell: Tell,
        fatal: tuple[type[TwinstreamError], ...] = (),
    ) -> None:
        self._prepared, self._options, self._fatal = prepared, prepared.options, fatal
        self._folder, self._record, self._tell = folder, record, tell
        self._every = every("save_every", prepared.options.save_every)
        self._evaluates = bool(prepared.options.eval_data)
        self._evaluated_step: int | None = None
        self._saved_s = monotonic()
        self.checkpoint = folder.checkpoint
        self.failure: TwinstreamError | None = None
        self.eval_loss: float | None = None

    def begin(self) -> None:
        """From now on it is counted how long ago the last checkpoint was."""
        self._saved_s = monotonic()

    def is_due(self, step: int) -> bool:
        """Whether there is something to do after a step that is not the last."""
        return self._saves_at(step) or self._evaluates_at(step)

    def rest(self, rest: AtRest, run: Underway) -> None:
        """Save, then evaluate, what is due, all after the last step: no evaluation that fails costs
        a checkpoint.

        Without a checkpoint that cannot be written training goes on; that of the last one is the
        run's `failure`.

        Raises:
            TwinstreamError: a fatal one.
        """
        step, saves = rest.step, rest.is_last or self._saves_at(rest.step)
        evaluates = rest.is_last or self._evaluates_at(step)
        if saves:
            self._save(rest, run)
        if rest.evaluate is not None and evaluates:
            self._evaluate(step, rest.evaluate)
        if saves:
            self._folder.checkpoints.prune(self._options.keep)
        run.recorder.skip_time()

    def _saves_at(self, step: int) -> bool:
        return self._every.is_due(step, monotonic() - self._saved_s)

    def _evaluates_at(self, step: int) -> bool:
        """With a checkpoint, where it is not said how often."""
        often = self._options.eval_every
        return self._evaluates and (self._saves_at(step) if often is None else step % often == 0)

    def _evaluate(self, step: int, evaluate: Callable[[], EvalMetrics]) -> None:
        if self._evaluated_step == step:
            return
        found = evaluate()
        self._evaluated_step, self.eval_loss = step, found.loss
        self._record(found)
        if self.checkpoint is not None and self.checkpoint.state.step == step:
            self.checkpoint.note_eval_loss(found.loss)

    def _save(self, rest: AtRest, run: Underway) -> None:
        """Save, where the disk is short with the room of what can be made again."""
        error = self._not_saved(rest, run)
        if error is not None and self._makes_room(error):
            error = self._not_saved(rest, run)
        if error is not None and rest.is_last and self.failure is None:
            self.failure = error
        elif error is not None:
            goes_on = "" if rest.is_last else ", training goes on"
            self._tell(f"no checkpoint after step {rest.step}{goes_on}: {error}")

    def _not_saved(self, rest: AtRest, run: Underway) -> TwinstreamError | None:
        """Write a checkpoint; why that failed, if it did."""
        try:
            self._write(rest, run)
        except self._fatal:
            raise
        except TwinstreamError as error:
            return error
        return None

    def _makes_room(self, error: TwinstreamError) -> bool:
        """Remove the tokens that are kept, which can be made again."""
        tokens = self._folder.files.tokens
        if not tokens.exists():
            return False
        self._tell(f"{tokens} is removed, to make room for a checkpoint: {error}")
        shutil.rmtree(tokens, ignore_errors=True)
        return True

    def _write(self, rest: AtRest, run: Underway) -> None:
        if self.checkpoint is not None and self.checkpoint.state.step == rest.step:
            return
        start_s = perf_counter()
        if not self._folder.files.options.exists():  # someone has removed or moved the folder
            self._folder.identify(self._prepared)
        checkpoints, state = self._folder.checkpoints, self._state(rest.step, run)
        self.checkpoint = checkpoints.write(state, rest.write_tensors)
        self._saved_s = monotonic()
        took_s = perf_counter() - start_s
        self._record(
            CheckpointMetrics(
                step=rest.step,
                path=self.checkpoint.path.name,
                bytes=self.checkpoint.size_bytes,
                seconds=took_s,
                device_held_s=took_s,
            )
        )

    def _state(self, step: int, run: Underway) -> TrainingState:
        prepared = self._prepared
        return TrainingState(
            step=step,
            num_steps=prepared.num_steps,
            seed=self._options.seed,
            fingerprint=prepared.data.fingerprint,
            position=DataPosition.of(run.batches.step(step).after),
            recipe=run.recipe,
            spec=prepared.model.spec,
            workload=run.workload,
            tokens=run.recorder.tokens,
            options=fixed_options(self._options),
            eval_loss=self.eval_loss if self._evaluated_step == step else None,
        )
