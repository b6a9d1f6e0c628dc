"""Rows predicted, each on its cluster as shipped or with constants that a fit tries."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Self

from twinstream.clusters.predict import Prepared
from twinstream.fidelity.clusters.constants import with_constants
from twinstream.fidelity.clusters.measured_steps import ClusterRow
from twinstream.fidelity.clusters.scoring import Predicted
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.planner.planner import gc_paused
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.worker_processes import WorkerContext, ignore_interrupts

Values = Mapping[str, float]
_KEPT = ("saved.", "boundary")
_HELD: dict[str, Prepared] = {}  # schedules that this process keeps, where it is a fit's worker


def predicted_row(
    row: ClusterRow, values: Values | None = None, *, hold: bool = False
) -> Predicted:
    """One row's step and memory; with `values`, on its cluster with these constants.

    `hold`: the process keeps the row's schedules for the next time that it is asked.
    """
    if row.job is None:
        return Predicted(refused=row.why_not)
    try:
        cluster = load_cluster(row.cluster)
        machine = machine_of(cluster)
        if values is not None:
            machine, cluster = with_constants(machine, cluster, values, "tried")
        with gc_paused():
            made = _HELD.get(row.family + row.row_id) or Prepared(row.job, cluster)
            found = made.on(cluster, machine)
        if hold:
            _HELD[row.family + row.row_id] = made
    except TwinstreamError as error:
        return Predicted(refused=str(error))
    return Predicted(
        step_s=found.step_s,
        fits=found.fits,
        memory_bytes=found.memory_bytes,
        activation_bytes=_kept(made) if row.activation_bytes is not None else None,
    )


def _kept(made: Prepared) -> int:
    """What the first stage keeps between forward and backward, without buffers; more microbatches
    than stages change nothing."""
    document = made.documents[0]
    first = document.of(document.classes[0])
    return sum(slot.size_bytes for slot in first.slots if slot.slot_id.startswith(_KEPT))


class RowPredictors:
    """A context: processes that predict rows, each its share; with `hold` they keep schedules."""

    def __init__(
        self,
        jobs: int | None,
        on_prediction: Callable[[], None] = lambda: None,
        *,
        hold: bool = False,
    ) -> None:
        self._on_prediction, self._hold = on_prediction, hold
        context = WorkerContext()
        # A pool each, so that what is asked of a row goes where its schedules are.
        self._pools = [
            ProcessPoolExecutor(1, mp_context=context, initializer=ignore_interrupts)
            for _ in range(jobs or os.cpu_count() or 1)
        ]
        self._place: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def predicted(
        self, rows: Sequence[ClusterRow], trials: Sequence[Values | None]
    ) -> list[Predicted]:
        """Each row with the trial at its place.

        Raises:
            CalibrationError: a process ended.
        """
        asked = [
            self._pool(row).submit(predicted_row, row, trial, hold=self._hold)
            for row, trial in zip(rows, trials, strict=True)
        ]
        try:
            for future in as_completed(asked):
                future.result()
                self._on_prediction()
        except BrokenProcessPool:
            raise CalibrationError("a worker process ended; was it short of memory?") from None
        return [future.result() for future in asked]

    def _pool(self, row: ClusterRow) -> ProcessPoolExecutor:
        place = self._place.setdefault(row.family + row.row_id, len(self._place))
        return self._pools[place % len(self._pools)]
