"""Read a run's folder: its events, its options, and its comparison with the prediction."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from pydantic import NonNegativeInt

from twinstream.log.metrics import (
    FILE,
    AnyEvent,
    CheckpointMetrics,
    EvalMetrics,
    StepMetrics,
    events_of_kind,
    read_metrics,
)
from twinstream.log.run_files import CLUSTER, COMPARISON, OPTIONS, PLAN
from twinstream.schedule.analysis.comparison import Comparison
from twinstream.schedule.files import DocumentError, read_bytes, read_document, reason_of
from twinstream.schedule.node import Node

_NUM_NAMED = 8


@dataclass(frozen=True)
class RunFolder:
    """The events of a run, and what lies beside them; what is None is not there.

    `comparison` is of one device; that of ranks is made anew from their timelines.
    """

    path: Path
    events: list[AnyEvent]
    options: str | None = None
    comparison: Comparison | None = None

    @cached_property
    def steps(self) -> list[StepMetrics]:
        return events_of_kind(self.events, StepMetrics)

    @cached_property
    def evals(self) -> list[EvalMetrics]:
        return events_of_kind(self.events, EvalMetrics)

    @cached_property
    def checkpoints(self) -> list[CheckpointMetrics]:
        return events_of_kind(self.events, CheckpointMetrics)


class RunSummary(Node):
    """A run in few numbers; None is what it has not (yet), medians are over its steps.

    `seconds` are those of its steps alone, without evaluations and what lies between.
    """

    num_steps: NonNegativeInt
    last_step: NonNegativeInt | None
    first_loss: float | None
    last_loss: float | None
    last_eval_loss: float | None
    best_eval_loss: float | None
    best_eval_step: NonNegativeInt | None
    tokens: NonNegativeInt
    seconds: float
    tokens_per_s: float | None
    predicted_tokens_per_s: float | None
    num_checkpoints: NonNegativeInt


def read_run_folder(folder: Path) -> RunFolder:
    """Read the folder of a run, while it goes on or after it.

    Raises:
        DocumentError: there is no run in the folder, or a file of it is damaged.
    """
    log, options, comparison = (folder / name for name in (FILE, OPTIONS, COMPARISON))
    if not log.is_file():
        raise DocumentError(_no_run(folder))
    of_one_device = comparison.exists() and not (folder / CLUSTER).exists()
    return RunFolder(
        folder,
        read_metrics(log),
        _text(options) if options.exists() else None,
        read_document(Comparison, comparison) if of_one_device else None,
    )


def run_summary(run: RunFolder) -> RunSummary:
    """Return the headline figures of a run."""
    steps, evals = run.steps, run.evals
    finite = [one for one in evals if math.isfinite(one.loss)]
    best = min(finite, key=lambda one: one.loss, default=None)
    predicted = [s.predicted_tokens_per_s for s in steps if s.predicted_tokens_per_s is not None]
    return RunSummary(
        num_steps=len(steps),
        last_step=steps[-1].step if steps else None,
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        last_eval_loss=evals[-1].loss if evals else None,
        best_eval_loss=best.loss if best else None,
        best_eval_step=best.step if best else None,
        tokens=sum(step.tokens for step in steps),
        seconds=sum(step.seconds for step in steps),
        tokens_per_s=median(step.tokens_per_s for step in steps) if steps else None,
        predicted_tokens_per_s=median(predicted) if predicted else None,
        num_checkpoints=len(run.checkpoints),
    )


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode(errors="replace")
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {reason_of(error)}") from None


def _no_run(folder: Path) -> str:
    """What is there instead of a run, and what to give."""
    try:
        names = sorted(f"{one.name}/" if one.is_dir() else one.name for one in folder.iterdir())
        runs = sorted(one.parent for one in folder.glob(f"*/{FILE}"))
    except OSError as error:
        return f"cannot read {folder}: {reason_of(error)}"
    has = ", ".join(names[:_NUM_NAMED]) or "nothing"
    if len(names) > _NUM_NAMED:
        has += f" and {len(names) - _NUM_NAMED:,} more"
    advice = "give a schedule, or a folder with the log of a training run"
    if runs:
        advice = f"give the folder of one run: {', '.join(map(str, runs[:_NUM_NAMED]))}"
    elif (folder / PLAN).is_file():
        advice += f", or the schedule {folder / PLAN}"
    return f"{folder} is no run's folder: it has {has}, but no {FILE}; {advice}"
