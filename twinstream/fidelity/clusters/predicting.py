"""Rows predicted, each on its cluster as shipped or with constants that a fit tries."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Self

from twinstream.clusters.predict import predict
from twinstream.fidelity.clusters.constants import with_constants
from twinstream.fidelity.clusters.scoring import Predicted
from twinstream.fidelity.clusters.tables.measured_row import ClusterRow
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.schedule.errors import TwinstreamError

_ACTIVATIONS = "activations"
Values = Mapping[str, float]


def predicted_row(row: ClusterRow, values: Values | None = None) -> Predicted:
    """One row's step and memory; with `values`, on its cluster with these constants."""
    if row.job is None:
        return Predicted(refused=row.why_not)
    try:
        cluster = load_cluster(row.cluster)
        machine = machine_of(cluster)
        if values is not None:
            machine, cluster = with_constants(machine, cluster, values, "tried")
        found = predict(row.job, cluster, machine=machine)
    except TwinstreamError as error:
        return Predicted(refused=str(error))
    return Predicted(
        step_s=found.step_s,
        fits=found.fits,
        memory_bytes=sum(found.memory.values()),
        activation_bytes=found.memory.get(_ACTIVATIONS),
    )


class RowPredictors:
    """A context: processes that predict rows; with `jobs` 1, this one does."""

    def __init__(self, jobs: int | None, on_prediction: Callable[[], None] = lambda: None) -> None:
        self._on_prediction = on_prediction
        self._jobs = jobs or os.cpu_count() or 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._jobs > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._jobs, mp_context=context, initializer=_leave_interrupts
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def predicted(
        self, rows: Sequence[ClusterRow], trials: Sequence[Values | None]
    ) -> list[Predicted]:
        """Each row with the trial at its place."""
        if self._pool is None:
            return [self._told(predicted_row(row, trial)) for row, trial in
                    zip(rows, trials, strict=True)]  # fmt: skip
        asked = [self._pool.submit(predicted_row, row, trial) for row, trial in
                 zip(rows, trials, strict=True)]  # fmt: skip
        return [self._told(_answer(future)) for future in asked]

    def _told(self, found: Predicted) -> Predicted:
        self._on_prediction()
        return found


def _answer(asked: Future[Predicted]) -> Predicted:
    try:
        return asked.result()
    except BrokenProcessPool:
        raise CalibrationError("a worker process ended; was it short of memory?") from None


def _leave_interrupts() -> None:
    """Ctrl-C is the asking process's, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
