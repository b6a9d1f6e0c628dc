"""Who looks on in a run, and where its events go."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from twinstream.log.metrics import (
    AnyEvent,
    CheckpointMetrics,
    EvalMetrics,
    MetricsLog,
    StepMetrics,
)
from twinstream.log.run_files import RunFiles
from twinstream.log.tensorboard import TensorBoardLog
from twinstream.training.preparing import Prepared


class Callback:
    """Told what happens in a run; each of these does nothing until it is overridden.

    What it raises ends the run. `Trainer.stop` asks for a checkpoint and the end.
    """

    def on_start(self, prepared: Prepared) -> None:
        """Before the first step."""

    def on_step(self, metrics: StepMetrics) -> None:
        """After each. Ranks that need data wait meanwhile: it had better be quick."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        """After each evaluation."""

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Once a checkpoint is complete."""


class RunLog:
    """Open while the run goes on; what was logged of later steps than `done` is dropped.

    Raises:
        DocumentError: the log is damaged, or cannot be written.
    """

    def __init__(
        self, files: RunFiles, done: int, callbacks: Sequence[Callback], *, tensorboard: bool
    ) -> None:
        self._files, self._done, self._callbacks = files, done, callbacks
        self._wants_board = tensorboard
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        log = self._stack.enter_context(MetricsLog(self._files.metrics))
        self._log, self._board = log.truncated_after(self._done), None
        if self._wants_board:
            board = TensorBoardLog(self._files.tensorboard, after_step=self._done or None)
            self._board = self._stack.enter_context(board)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def record(self, event: AnyEvent) -> None:
        """Take what has happened."""
        self._log.append(event)
        if self._board is not None:
            self._board.append(event)
        for callback in self._callbacks:
            if isinstance(event, EvalMetrics):
                callback.on_eval(event)
            elif isinstance(event, CheckpointMetrics):
                callback.on_checkpoint(event)
            else:
                callback.on_step(event)
