"""The same events for TensorBoard, where it is installed."""

from pathlib import Path
from typing import Any, Self

from twinstream.log.metrics import AnyEvent, CheckpointMetrics, EvalMetrics
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, reason_of

_OF_A_STEP = ("loss", "learning_rate", "grad_norm", "tokens_per_s")
_OF_AN_EVALUATION = ("loss", "perplexity")


class TensorBoardMissingError(TwinstreamError):
    """TensorBoard was asked for and is not installed."""


class TensorBoardLog:
    """Scalars `train/...` and `eval/...` by step, in a folder that `tensorboard --logdir` shows.

    A run that goes on from a step gives it as `after_step`; TensorBoard then hides what an earlier
    run wrote of later ones.

    Raises:
        TensorBoardMissingError: says what to install.
        DocumentError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, after_step: int | None = None) -> None:
        purge_step = None if after_step is None else after_step + 1
        try:
            self._writer = _writer_class()(str(folder), purge_step=purge_step)
        except OSError as error:
            raise DocumentError(f"cannot write {folder}: {reason_of(error)}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, event: AnyEvent) -> None:
        """Write the scalars of a step or an evaluation; checkpoints have none."""
        for name, value in scalars_of(event).items():
            self._writer.add_scalar(name, value, global_step=event.step)

    def close(self) -> None:
        self._writer.close()


def require_tensorboard() -> None:
    """
    Raises:
        TensorBoardMissingError: says what to install.
    """
    _writer_class()


def scalars_of(event: AnyEvent) -> dict[str, float]:
    """Return what TensorBoard shows of an event, by tag; what is unknown is left out."""
    if isinstance(event, CheckpointMetrics):
        return {}
    evaluated = isinstance(event, EvalMetrics)
    group, names = ("eval", _OF_AN_EVALUATION) if evaluated else ("train", _OF_A_STEP)
    found = {f"{group}/{name}": getattr(event, name) for name in names}
    if event.preference is not None:
        found |= {f"{group}/preference/{name}": value for name, value in event.preference}
    return {name: value for name, value in found.items() if value is not None}


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        missing = error.name or "a part of it"
        raise TensorBoardMissingError(
            f"logging for TensorBoard needs TensorBoard and torch, and {missing} is not installed: "
            "pip install 'twinstream[tensorboard]'; metrics.jsonl has the same numbers without it"
        ) from None
    return SummaryWriter
