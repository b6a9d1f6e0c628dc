"""Processes that hold schedules of table rows and price them on the machines they are sent."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Self, TypeVar

from twinstream.fidelity.cells import Cell, cell_of
from twinstream.fidelity.predict import step_s
from twinstream.hardware_profiles.calibration.search import TimeQuery
from twinstream.hardware_profiles.calibration.timelines import works_of
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cost import Work
from twinstream.schedule.worker_processes import WorkerContext, ignore_interrupts

_Answer = TypeVar("_Answer")
_HELD: dict[int, Cell] = {}  # the schedules of this process's rows, where it is a worker


class CellWorkers:
    """A context: one process per CPU core, each with the schedules of its share of the rows.

    `keys[i]` is equal for rows of one schedule, `tokens_per_step[i]` a row's tokens of an optimizer
    step; `works` is what the schedules' kernels do.
    """

    def __init__(
        self, rows: Sequence[MeasuredRow], on_prediction: Callable[[], None] = lambda: None
    ) -> None:
        self._rows, self._on_prediction = rows, on_prediction
        context = WorkerContext()
        num_workers = max(1, min(len(rows), os.cpu_count() or 1))
        # A pool each, so that a row's predictions go where its schedule is.
        self._pools = [
            ProcessPoolExecutor(1, mp_context=context, initializer=ignore_interrupts)
            for _ in range(num_workers)
        ]
        self.keys: list[str] = []
        self.tokens_per_step: list[int] = []
        self.works: list[Work] = []

    def __enter__(self) -> Self:
        try:
            held = [self._pool(i).submit(_hold, i, row) for i, row in enumerate(self._rows)]
            for key, tokens_per_step, works in _answers(held):
                self.keys.append(key)
                self.tokens_per_step.append(tokens_per_step)
                self.works += works
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def seconds(self, trials: Sequence[TimeQuery]) -> list[float]:
        """Predicted seconds of a step of each trial's row on its machine."""
        asked = [self._pool(t.index).submit(_seconds, t.index, t.machine) for t in trials]
        return _answers(asked, self._on_prediction)

    def _pool(self, index: int) -> ProcessPoolExecutor:
        return self._pools[index % len(self._pools)]


def _answers(
    asked: Sequence[Future[_Answer]], on_answer: Callable[[], None] = lambda: None
) -> list[_Answer]:
    try:
        for future in as_completed(asked):
            future.result()
            on_answer()
    except BrokenProcessPool:
        raise CalibrationError("a worker process ended; was it short of memory?") from None
    return [future.result() for future in asked]


def _hold(index: int, row: MeasuredRow) -> tuple[str, int, list[Work]]:
    cell = _HELD[index] = cell_of(row)
    return repr(cell.key.plan), cell.tokens_per_step, works_of(cell.timed)


def _seconds(index: int, machine: Machine) -> float:
    return step_s(_HELD[index], machine)
