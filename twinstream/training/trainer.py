"""A training run: prepared, started or gone on with, and what it comes to."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstream.api import require_torch
from twinstream.log.tensorboard import require_tensorboard
from twinstream.measures.metrics import Summary, summarize
from twinstream.schedule.analysis.comparison import Comparison, compare
from twinstream.schedule.files import write_document
from twinstream.schedule.timeline import Timeline
from twinstream.training.amounts import every
from twinstream.training.callbacks import Callback
from twinstream.training.machine import machine_here
from twinstream.training.opening import open_model
from twinstream.training.options import TrainOptions
from twinstream.training.preparing import Prepared, Tell, prepare
from twinstream.training.ranks.trainer import RanksResult, RanksTrainer
from twinstream.training.run.run_folder import RunFolder, RunResult
from twinstream.training.run.run_log import RunLog
from twinstream.training.run.segment_run import SegmentRun
from twinstream.training.run.segments import Segment, segments
from twinstream.training.run.stopping import Stop


@dataclass(frozen=True, kw_only=True)
class TrainResult(RunResult):
    """What a run came to.

    Attributes:
        predicted, measured: of the last schedule; `measured` is None where no step was done.
        disturbed: a sentence if other programs had the cores while it was measured.
    """

    predicted: Summary
    measured: Summary | None
    disturbed: str | None = None


class Trainer:
    """One run in one folder.

    Args:
        resume: go on from the folder's last checkpoint; from the start where there is none yet.
        callbacks: told of steps, evaluations and checkpoints.
        tell: takes a line about what is going on before the first step, and warnings.

    Raises:
        TwinstreamError: there is no torch, or the folder has another run.
    """

    def __init__(
        self,
        options: TrainOptions,
        *,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        tell: Tell = lambda line: None,
    ) -> None:
        require_torch()
        self._options, self._callbacks, self._tell = options, tuple(callbacks), tell
        self.stop = Stop(tell)
        every("save_every", options.save_every)  # raises before any work, as does the next line
        if options.tensorboard:
            require_tensorboard()
        self._folder = RunFolder(options, resume=resume)
        self._prepared: Prepared | None = None

    @property
    def steps_done(self) -> int:
        """Before this start, by the checkpoint that is gone on from."""
        return self._folder.steps_done

    def prepare(self, *, weights: bool = True) -> Prepared:
        """Model, data and plan; nothing is written, and it is done once.

        Args:
            weights: False lets the model's weights be missing, for who does not train.

        Raises:
            TwinstreamError: something cannot be used, or nothing fits.
        """
        if self._prepared is None:
            from twinstream.executor.run.execute import choose_backend

            options, folder = self._options, self._options.output
            model = open_model(options, weights=weights)
            backend = choose_backend(options.backend)
            self._tell("looking at this machine")
            here = machine_here(options, folder, backend, model.spec.dtype, self._tell)
            self._prepared = prepare(options, here, model, self._folder.checkpoint, self._tell)
        return self._prepared

    def train(self) -> TrainResult:
        """Train until the last step, or until stopped; the state is in a checkpoint then.

        Raises:
            RunEndedError: the data ends it, or the last checkpoint cannot be written.
            TwinstreamError: what a run can meet: no memory, a full disk, a loss that is no number.
        """
        prepared, done = self.prepare(), self.steps_done
        parts = segments(prepared, done)
        plans = [prepared.plan, *(part.plan for part in parts)]
        needed_bytes = max(plan.checkpoint_bytes for plan in plans)
        with ExitStack() as stack:
            stack.enter_context(self._folder.begun(prepared, needed_bytes))
            self._write_plan(prepared)
            for callback in self._callbacks:
                callback.on_start(prepared)
            board = prepared.options.tensorboard
            log = RunLog(self._folder.files, done, self._callbacks, tensorboard=board)
            stack.enter_context(log)
            stack.enter_context(self.stop.heeded())
            run = SegmentRun(prepared, self._folder, log.record, self.stop, self._tell)
            stack.enter_context(run)
            return self._trained(prepared, parts, run)

    def _trained(
        self, prepared: Prepared, parts: Sequence[Segment], run: SegmentRun
    ) -> TrainResult:
        timeline, part = None, None
        for part in parts:
            timeline = run.train(part)
            if run.stopped:
                break
        reached = self._folder.reached(run.rests.checkpoint, prepared.num_steps)
        measured = disturbed = None
        if part is not None and timeline is not None:
            measured = summarize(part.plan.schedule, timeline, prepared.here.machine)
            disturbed = self._compared(part, timeline).disturbed
        plan = prepared.plan if part is None else part.plan
        predicted = summarize(plan.schedule, plan.predicted, prepared.here.machine)
        result = TrainResult(
            folder=self._folder.files.folder, model=reached.model, step=reached.step,
            loss=run.loss, eval_loss=run.rests.eval_loss, signal=self.stop.signal,
            fill=run.fill, waited_s=run.waited_s, skipped=run.skipped,
            predicted=predicted, measured=measured, disturbed=disturbed,
        )  # fmt: skip
        if run.rests.failure is not None:
            raise self._folder.ended(run.rests.failure, result)
        return result

    def _write_plan(self, prepared: Prepared) -> None:
        if self.steps_done < prepared.num_steps:
            self._folder.files.forget_ranks()
            write_document(prepared.plan.schedule, self._folder.files.plan)

    def _compared(self, part: Segment, timeline: Timeline) -> Comparison:
        """Write the comparison, op by op, beside the log."""
        plan = part.plan
        write_document(plan.schedule, self._folder.files.plan)
        comparison = compare(plan.schedule, plan.predicted, timeline)
        write_document(comparison, self._folder.files.comparison)
        return comparison


def train(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> TrainResult | RanksResult:
    """Train a model on data: `twinstream train MODEL DATA... -o DIR`.

    Args:
        model: a Hugging Face folder, a config.json (random weights) or a preset.
        data: files and folders: .txt, .jsonl, .parquet, .bin; `PATH=WEIGHT` gives a weight.
        output: the folder of the run, which is made.
        resume: go on from the last checkpoint in `output`.
        callbacks: told of steps, evaluations and checkpoints.
        options: fields of `TrainOptions`.

    Raises:
        TwinstreamError: an option, a file or the plan; a loss that is no number; a full disk.
    """
    several = [data] if isinstance(data, str | Path) else list(data)
    given = {"model": str(model), "data": [str(one) for one in several], "output": output}
    wanted = TrainOptions.of(given | options)
    return trainer_of(wanted, resume=resume, callbacks=callbacks).train()


def trainer_of(
    options: TrainOptions,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    tell: Tell = lambda line: None,
) -> Trainer | RanksTrainer:
    """Of one device or, where the options ask for several ranks, of these.

    Raises:
        TwinstreamError: as these.
    """
    kind = RanksTrainer if (options.ranks or 1) > 1 else Trainer
    return kind(options, resume=resume, callbacks=callbacks, tell=tell)
