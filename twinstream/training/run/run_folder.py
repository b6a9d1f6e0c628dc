"""The folder of a run as its trainer finds it, and what of a run is written there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twinstream.data.data_error import DataError
from twinstream.executor.weights.durable_files import make_room
from twinstream.log.run_files import RunFiles
from twinstream.measures.metrics import Summary
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import (
    only_writer,
    reason_of,
    require_folder,
    require_no_writer,
    write_document,
)
from twinstream.training.checkpoints import (
    COMPLETE,
    STATE_FILE,
    Checkpoint,
    Checkpoints,
    linked_copy,
)
from twinstream.training.machine import keep_machine
from twinstream.training.options import (
    OptionsError,
    TrainOptions,
    read_options,
    require_same,
    write_options,
)
from twinstream.training.preparing import Prepared


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    Attributes:
        folder: of the run.
        model: its weights as a Hugging Face folder; None where the run was stopped before its end.
        step: the last that was done.
        loss: of that step; None where none was done.
        eval_loss: of the last evaluation.
        signal: that ended it; 0 is none.
        fill: share of the tokens that were no padding.
        waited_s: how long steps waited for data, after the first.
        skipped: why rows were left out, since this start.
        predicted_tokens_per_s, measured_tokens_per_s: of a step. Measured is the median of the
            steps but the first, and None where there was no other.
        predicted, measured: of the last plan; `measured` is None where no step was done.
        disturbed: a sentence if other programs had the cores while it was measured.
    """

    folder: Path
    model: Path | None
    step: int
    loss: float | None
    eval_loss: float | None
    signal: int
    fill: float
    waited_s: float
    skipped: tuple[str, ...] = ()
    predicted_tokens_per_s: float
    measured_tokens_per_s: float | None
    predicted: Summary
    measured: Summary | None
    disturbed: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether it ended before its last step."""
        return self.model is None


class RunEndedError(TwinstreamError):
    """A run ended before its end, with all that could be kept of it: see `result`."""

    def __init__(self, problem: str, result: TrainResult) -> None:
        super().__init__(problem)
        self.result = result


class TrainingFolder:
    """Where a run is to be, or is already.

    Args:
        resume: go on from the last checkpoint; from the start where there is none yet.

    Attributes:
        checkpoint: to go on from.
        options: those given, with the length of sequences of the run that goes on.

    Raises:
        TwinstreamError: the folder cannot be made, has another run, or none to go on with, or
            other files; a checkpoint is damaged.
    """

    def __init__(self, options: TrainOptions, *, resume: bool) -> None:
        self.files, self._resume = RunFiles(options.output), resume
        require_usable(self.files, resume=resume)
        require_folder(self.files.folder)
        self.checkpoints = Checkpoints(options.output)
        self.checkpoint: Checkpoint | None = None
        require_no_writer(self.files.folder)
        if resume and self.files.options.exists():
            kept = TrainOptions.of(read_options(self.files.options), f"{self.files.options}: ")
            if "seq_len" not in options.model_fields_set:  # which a model may have shortened
                options = options.with_seq_len(kept.seq_len)
            require_same(options, kept)
            self.checkpoint = self.checkpoints.latest()
            if self.checkpoint is not None:
                self.checkpoint.require_options(kept, self.files.options)
        self.options = options

    @property
    def steps_done(self) -> int:
        """Before this start, by the checkpoint that is gone on from."""
        return 0 if self.checkpoint is None else self.checkpoint.state.step

    @contextmanager
    def begun(self, prepared: Prepared, needed_bytes: int) -> Iterator[None]:
        """Make the folder, write what identifies its run, and hold it until the run has ended.

        Args:
            needed_bytes: of one checkpoint.

        Raises:
            DocumentError: another process holds it, or it cannot be written.
            OptionsError: another process has trained there since it was looked at.
            WeightsError: there is too little room for a checkpoint.
        """
        with only_writer(self.files.folder):
            require_usable(self.files, resume=self._resume)
            if self.checkpoints.complete()[-1:] != [c.path for c in (self.checkpoint,) if c]:
                raise OptionsError(
                    f"another process has trained in {self.files.folder} meanwhile: start again"
                )
            self.checkpoints.remove_partial()
            self.files.remove_leftovers()
            if self.steps_done < prepared.num_steps:
                make_room(self.files.folder, needed_bytes)
            self.identify(prepared)
            yield

    def identify(self, prepared: Prepared) -> None:
        """Write what says which run it is, and how it goes on.

        Raises:
            DocumentError: it cannot be written.
        """
        self.files.make()
        write_document(prepared.data.record, self.files.data)
        write_options(prepared.options, self.files.folder)
        keep_machine(prepared.here, self.files.folder)

    def ended(self, failure: TwinstreamError, result: TrainResult) -> RunEndedError:
        """Of a run that something ended: what that was, what is kept, and how to go on."""
        problem = f"{str(failure).rstrip('.')}. "
        if result.step:
            problem += f"All up to step {result.step} is in {self.files.folder}"
        else:
            problem += "No step is kept"
        if isinstance(failure, DataError):
            problem += (
                ": mend the file and go on (--resume), or let so many rows be skipped "
                "(--resume --skip-bad-rows N)"
            )
        return RunEndedError(problem, result)

    def reached(self, checkpoint: Checkpoint | None, num_steps: int) -> tuple[int, Path | None]:
        """The last step that is kept; after so many steps the trained model, too."""
        step = 0 if checkpoint is None else checkpoint.state.step
        if checkpoint is None or step < num_steps:
            return step, None
        from twinstream.executor.weights.checkpoint_files import OPTIMIZER

        others = (STATE_FILE, COMPLETE, OPTIMIZER)
        linked_copy(checkpoint.path, self.files.model, leave_out=others)
        return step, self.files.model


def require_usable(files: RunFiles, *, resume: bool) -> None:
    """
    Raises:
        OptionsError: the folder has another run that has trained a step, or none to go on with, or
            other files.
        DocumentError: another process is writing there.
    """
    folder = files.folder
    try:
        exists, has_run = folder.exists(), files.options.exists()
        others = [] if has_run or not folder.is_dir() else files.others()
        is_begun = has_run and files.has_steps()
    except OSError as error:
        raise OptionsError(f"{folder} cannot be the folder of a run: {reason_of(error)}") from None
    if resume and (not exists or others):
        raise OptionsError(
            f"{folder} has no run to go on with ({files.options.name} is missing): leave out "
            "--resume"
        )
    if is_begun and not resume:
        raise OptionsError(
            f"{folder} has a run already: go on with it (--resume), or choose another folder"
        )
    if others or (exists and not folder.is_dir()):
        there = f" ({others[0].name} is in it)" if others else ""
        raise OptionsError(
            f"{folder} is not an empty folder{there}: choose another one for the run, or empty it"
        )
