"""What is done between the steps of a run, while nothing runs: checkpoints and evaluations."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter

from twinstream.executor.ranks.errors import RanksError
from twinstream.log.metrics import AnyEvent, CheckpointMetrics, EvalMetrics
from twinstream.models.lowering.optimizer_tasks import state_parts
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload
from twinstream.training.amounts import every
from twinstream.training.checkpoints import DataPosition, TrainingState
from twinstream.training.machine import Tell
from twinstream.training.options import fixed_options
from twinstream.training.preparing import Prepared
from twinstream.training.run.run_folder import TrainingFolder
from twinstream.training.run.steps import StepBatches, StepRecorder


@dataclass(frozen=True)
class RunProgress:
    """What trains by one plan: how, and how far it has come in its data."""

    recipe: Recipe
    workload: Workload
    batches: StepBatches
    recorder: StepRecorder


class StepHooks:
    """Says when checkpoints and evaluations are due, and does them.

    Attributes:
        checkpoint: the last that is complete; at first the folder's.
        failure: why the run ends early, or its last checkpoint could not be written.
        eval_loss: of the last evaluation; None before the first.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: TrainingFolder,
        record: Callable[[AnyEvent], None],
        tell: Tell,
    ) -> None:
        self._prepared, self._options = prepared, prepared.options
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

    def due(self, step: int, *, is_last: bool) -> tuple[bool, bool]:
        """Whether a checkpoint, and whether an evaluation is due after a step.

        Both are after the last step. Where it is not said how often to evaluate, it is done with
        each checkpoint.
        """
        saves = is_last or self._every.is_due(step, monotonic() - self._saved_s)
        often = self._options.eval_every
        evaluates = is_last or (saves if often is None else step % often == 0)
        return saves, evaluates and self._evaluates

    def evaluate(self, step: int, evaluate: Callable[[int], EvalMetrics]) -> None:
        """Evaluate the state after a step, unless that has been done."""
        if self._evaluated_step == step:
            return
        found = evaluate(step)
        self._evaluated_step, self.eval_loss = step, found.loss
        self._record(found)
        if self.checkpoint is not None and self.checkpoint.state.step == step:
            self.checkpoint.note_eval_loss(found.loss)

    def write_checkpoint(
        self,
        step: int,
        progress: RunProgress,
        write_tensors: Callable[[Path], None],
        *,
        is_last: bool,
    ) -> None:
        """Write a checkpoint, where the disk is short in the room of what can be made again.

        Without a checkpoint that cannot be written training goes on; that of the last one is the
        run's `failure`.

        Raises:
            TwinstreamError: a rank has failed.
        """
        error = self._not_saved(step, progress, write_tensors)
        if error is not None and self._makes_room(error):
            error = self._not_saved(step, progress, write_tensors)
        if error is not None and is_last and self.failure is None:
            self.failure = error
        elif error is not None:
            goes_on = "" if is_last else ", training goes on"
            self._tell(f"no checkpoint after step {step}{goes_on}: {error}")

    def prune(self) -> None:
        """Remove the checkpoints that are not kept."""
        self._folder.checkpoints.prune(self._options.keep)

    def _not_saved(
        self, step: int, progress: RunProgress, write_tensors: Callable[[Path], None]
    ) -> TwinstreamError | None:
        """Write a checkpoint; why that failed, if it did."""
        try:
            self._write(step, progress, write_tensors)
        except RanksError:  # which has the state
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

    def _write(
        self, step: int, progress: RunProgress, write_tensors: Callable[[Path], None]
    ) -> None:
        if self.checkpoint is not None and self.checkpoint.state.step == step:
            return
        start_s = perf_counter()
        if not self._folder.files.options.exists():  # someone has removed or moved the folder
            self._folder.identify(self._prepared)
        checkpoints, state = self._folder.checkpoints, self._state(step, progress)
        self.checkpoint = checkpoints.write(state, write_tensors)
        self._saved_s = monotonic()
        took_s = perf_counter() - start_s
        self._record(
            CheckpointMetrics(
                step=step,
                path=self.checkpoint.path.name,
                bytes=self.checkpoint.size_bytes,
                seconds=took_s,
                device_held_s=took_s,
            )
        )

    def _state(self, step: int, progress: RunProgress) -> TrainingState:
        prepared = self._prepared
        return TrainingState(
            step=step,
            num_steps=prepared.num_steps,
            seed=self._options.seed,
            fingerprint=prepared.data.fingerprint,
            position=DataPosition.of(progress.batches.step(step).after),
            recipe=progress.recipe,
            spec=prepared.model.spec,
            workload=progress.workload,
            tokens=progress.recorder.tokens,
            options=fixed_options(self._options),
            state_parts=state_parts(prepared.model.spec, progress.recipe),
            eval_loss=self.eval_loss if self._evaluated_step == step else None,
        )
