"""The folder of a run as its trainer finds it, and what of a run is written there."""

from dataclasses import dataclass
from pathlib import Path

from twinstream.log.run_files import RunFiles
from twinstream.schedule.files import require_folder
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
from twinstream.training.preparing import Opened


@dataclass(frozen=True, kw_only=True)
class RunResult:
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
    """

    folder: Path
    model: Path | None
    step: int
    loss: float | None
    eval_loss: float | None
    signal: int
    fill: float
    waited_s: float

    @property
    def stopped(self) -> bool:
        """Whether it ended before its last step."""
        return self.model is None


@dataclass(frozen=True)
class Reached:
    """The last step that is kept; the trained model, where no steps are left."""

    step: int
    model: Path | None


class RunFolder:
    """Where a run is to be, or is already.

    Args:
        resume: go on from the last checkpoint; from the start where there is none yet.

    Attributes:
        checkpoint: to go on from.

    Raises:
        TwinstreamError: the folder cannot be made, has another run, or none to go on with, or
            other files; a checkpoint is damaged.
    """

    def __init__(self, options: TrainOptions, *, resume: bool) -> None:
        self.files = RunFiles(options.output)
        require_folder(self.files.folder)
        _require_usable(self.files, resume=resume)
        if resume:
            require_same(options, TrainOptions.of(read_options(self.files.options)))
        self.checkpoints = Checkpoints(options.output)
        self.checkpoint: Checkpoint | None = self.checkpoints.latest() if resume else None

    @property
    def steps_done(self) -> int:
        """Before this start, by the checkpoint that is gone on from."""
        return 0 if self.checkpoint is None else self.checkpoint.state.step

    def begin(self, prepared: Opened) -> None:
        """Make the folder, and write what identifies its run.

        Raises:
            DocumentError: it cannot be written.
        """
        self.files.make()
        self.checkpoints.remove_partial()
        write_options(prepared.options, self.files.folder)
        keep_machine(prepared.here, self.files.folder)

    def reached(self, checkpoint: Checkpoint | None, num_steps: int) -> Reached:
        """How far a run has come with its last checkpoint, of so many steps."""
        step = 0 if checkpoint is None else checkpoint.state.step
        if checkpoint is None or step < num_steps:
            return Reached(step, None)
        linked_copy(checkpoint.path, self.files.model, leave_out=(STATE_FILE, COMPLETE))
        return Reached(step, self.files.model)


def _require_usable(files: RunFiles, *, resume: bool) -> None:
    """
    Raises:
        OptionsError: the folder has another run, or none to go on with, or other files.
    """
    folder, has_run = files.folder, files.options.exists()
    if resume and not has_run:
        raise OptionsError(
            f"{folder} has no run to go on with ({files.options.name} is missing): leave out "
            "--resume"
        )
    if resume:
        return
    if has_run:
        raise OptionsError(
            f"{folder} has a run already: go on with it (--resume), or choose another folder"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionsError(
            f"{folder} is not an empty folder: choose another one for the run, or empty it"
        )
