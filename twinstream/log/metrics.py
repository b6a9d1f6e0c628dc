"""The log of steps, evaluations and checkpoints: a line of JSON each, in one file."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)

from twinstream.schedule.files import (
    DocumentError,
    open_file,
    open_for_append,
    reason_of,
    write_bytes,
)
from twinstream.schedule.node import Node

FILE = "metrics.jsonl"
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def _number(value: object) -> object:
    """JSON has no NaN and no infinities: they are written as strings."""
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


Real = Annotated[float, BeforeValidator(_number)]
Duration = Annotated[float, Field(ge=0)]


class Event(Node):
    """Something that happened in a run, after so many steps; `at` is when, in UTC."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: NonNegativeInt
    at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))


class PairMetrics(Node):
    """Means over the pairs of a step (DPO), by the model before this step's update.

    Attributes:
        accuracy: share of pairs whose margin is above 0.
        margin: the chosen answer's reward less the rejected one's.
        chosen_reward, rejected_reward: beta times how much likelier than by the reference, in nats.
        chosen_loss, rejected_loss: cross entropy of such answers, nats a token.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    pairs: NonNegativeInt
    accuracy: Real
    margin: Real
    chosen_reward: Real
    rejected_reward: Real
    chosen_loss: Real
    rejected_loss: Real

    @property
    def text(self) -> str:
        """Return margin and accuracy as a line for a screen."""
        return f"margin {self.margin:+.3f}, accuracy {self.accuracy:.0%}"


class StepMetrics(Event):
    """One step.

    Attributes:
        step: how many steps were done with it; the first step is 1.
        loss: mean over the step's targets or, of DPO, over its pairs.
        grad_norm: of all gradients, before clipping; None where it was not computed.
        tokens: trained tokens of the step, without padding.
        targets: tokens that had a label.
        seconds: wall time of the step.
        epoch: how often the data was gone through, with fractions.
    """

    kind: Literal["step"] = "step"
    loss: Real
    learning_rate: Real
    grad_norm: Real | None = None
    tokens: NonNegativeInt
    targets: NonNegativeInt
    seconds: Duration
    tokens_per_s: Real
    predicted_tokens_per_s: Real | None = None
    epoch: Real = 0.0
    preference: PairMetrics | None = None


class EvalMetrics(Event):
    """One evaluation, of the weights after `step` steps; only cross entropy has a perplexity."""

    kind: Literal["eval"] = "eval"
    loss: Real
    perplexity: Real | None = None
    tokens: NonNegativeInt
    seconds: Duration
    preference: PairMetrics | None = None

    @property
    def text(self) -> str:
        """The loss and what goes with it, for a screen."""
        if self.preference is not None:
            return f"loss {self.loss:.4f}, {self.preference.text}"
        perplexity = "" if self.perplexity is None else f", perplexity {self.perplexity:.4g}"
        return f"loss {self.loss:.4f}{perplexity}"


class CheckpointMetrics(Event):
    """One checkpoint.

    Attributes:
        bytes: of all its files.
        seconds: from the start of writing to its completeness marker.
        device_held_s: how long the device had nothing to do because of it.
    """

    kind: Literal["checkpoint"] = "checkpoint"
    path: str
    bytes: NonNegativeInt
    seconds: Duration
    device_held_s: Duration = 0.0


AnyEvent: TypeAlias = StepMetrics | EvalMetrics | CheckpointMetrics
_EVENTS: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])
_Kind = TypeVar("_Kind", StepMetrics, EvalMetrics, CheckpointMetrics)


class MetricsLog:
    """A file of events; each is in it, whole, when `append` returns.

    A kill of the process leaves all events before it, and at most the beginning of one more,
    which is cut off when the log is opened again. At a checkpoint all is synced to the disk.

    Raises:
        DocumentError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_for_append(path)
            whole = _whole_bytes(path)
            if whole != self._file.tell():
                self._file.truncate(whole)
        except OSError as error:
            raise _unwritable(path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def append(self, event: AnyEvent) -> None:
        """Write one event; on an error the file is as long as before.

        Raises:
            DocumentError: it cannot be written.
        """
        line = event.model_dump_json().encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        try:
            try:
                while line:
                    line = line[self._file.write(line) :]
                if isinstance(event, CheckpointMetrics):
                    os.fsync(self._file.fileno())
            except BaseException:
                self._file.truncate(before)
                raise
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def truncated_after(self, step: int) -> Self:
        """Drop the events of later steps, for a run that goes on from this one.

        Raises:
            DocumentError: the log is damaged, or cannot be written.
        """
        kept = [line for line, event in _lines(self.path) if event.step <= step]
        if len(kept) != sum(1 for _ in _lines(self.path)):
            self._file.close()
            write_bytes(b"".join(kept), self.path)
            self._file = open_for_append(self.path)
        return self


def read_metrics(path: Path) -> list[AnyEvent]:
    """All events of a log, in order; a last line that a kill cut off is left out.

    Raises:
        DocumentError: there is no log, or a line is no event; says which line and why.
    """
    return [event for _, event in _lines(path)]


def events_of_kind(events: list[AnyEvent], kind: type[_Kind]) -> list[_Kind]:
    """The steps, the evaluations or the checkpoints among events, in order."""
    return [event for event in events if isinstance(event, kind)]


def _lines(path: Path) -> Iterator[tuple[bytes, AnyEvent]]:
    try:
        with open_file(path) as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield line, _event(line, f"{path}:{number}")
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {reason_of(error)}") from None


def _event(line: bytes, place: str) -> AnyEvent:
    try:
        return _EVENTS.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DocumentError(
            f"{place}: no event of a run: {where + ': ' if where else ''}{first['msg']}; remove "
            "that line, or take the log from a copy"
        ) from None


def _whole_bytes(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    with open_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 2**16)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _unwritable(path: Path, error: OSError) -> DocumentError:
    return DocumentError(
        f"cannot write {path}: {reason_of(error)}; the events before are kept, and the last "
        "checkpoint can be gone on from once there is room"
    )
