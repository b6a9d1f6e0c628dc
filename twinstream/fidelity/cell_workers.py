"""Processes that hold schedules of table rows and price them on the machines they are sent."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

from twinstream.fidelity.predict import RowCell, cell_of_row, step_s
from twinstream.hardware_profiles.calibration.search import TimeQuery
from twinstream.hardware_profiles.calibration.timelines import works_of
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.schedule.cost import Work
from twinstream.schedule.worker_processes import WorkerContext, ignore_interrupts

_Answer = TypeVar("_Answer")
_HELD: dict[int, RowCell] = {}  # the schedules of this process's rows, where it is a worker


class CellWorkers:
    """A context: one process per CPU core, each with the schedules of its share of the rows.

    Rows of ours are planned for `base`, once, however often they are held.
    """

    def __init__(self, base: Machine) -> None:
        self._base = base
        self._rows: list[MeasuredRow] = []
        self._made: list[tuple[str, int, list[Work]]] = []
        context = WorkerContext()
        # A pool each, so that a row's predictions go where its schedule is.
        self._pools = [
            ProcessPoolExecutor(1, mp_context=context, initializer=ignore_interrupts)
            for _ in range(os.cpu_count() or 1)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def hold(
        self, rows: Sequence[MeasuredRow], on_row: Callable[[], None] = lambda: None
    ) -> "HeldCells":
        """The rows' schedules; `on_row` is called when one is made that was not held before."""
        places = {id(row): place for place, row in enumerate(self._rows)}
        new = [row for row in rows if id(row) not in places]
        start = len(self._rows)
        asked = [
            self._pool(place).submit(_hold, place, row, self._base)
            for place, row in enumerate(new, start)
        ]
        self._made += _answers(asked, on_row)
        self._rows += new
        places |= {id(row): place for place, row in enumerate(new, start)}
        held = [places[id(row)] for row in rows]
        made = [self._made[place] for place in held]
        return HeldCells(
            self,
            tuple(held),
            keys=tuple(key for key, _, _ in made),
            tokens_per_step=tuple(tokens for _, tokens, _ in made),
            works=tuple(work for _, _, works in made for work in works),
        )

    def seconds_at(
        self, asked: Sequence[tuple[int, Machine]], on_prediction: Callable[[], None]
    ) -> list[float]:
        """Predicted seconds of a step of each held row on its machine."""
        futures = [self._pool(at).submit(_seconds, at, machine) for at, machine in asked]
        return _answers(futures, on_prediction)

    def _pool(self, place: int) -> ProcessPoolExecutor:
        return self._pools[place % len(self._pools)]


@dataclass(frozen=True)
class HeldCells:
    """The schedules of some rows, which worker processes hold.

    `keys[i]` is equal for rows of one schedule, `tokens_per_step[i]` a row's tokens of an optimizer
    step; `works` is what the schedules' kernels do.
    """

    workers: CellWorkers
    places: tuple[int, ...]
    keys: tuple[str, ...]
    tokens_per_step: tuple[int, ...]
    works: tuple[Work, ...]

    def seconds(
        self, trials: Sequence[TimeQuery], on_prediction: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Predicted seconds of a step of each trial's row on its machine."""
        asked = [(self.places[trial.index], trial.machine) for trial in trials]
        return self.workers.seconds_at(asked, on_prediction)


@contextmanager
def held_cells(
    base: Machine, rows: Sequence[MeasuredRow], workers: CellWorkers | None
) -> Iterator[HeldCells]:
    """The rows' schedules, of these workers or of some that end with the context."""
    if workers is not None:
        yield workers.hold(rows)
        return
    with CellWorkers(base) as own:
        yield own.hold(rows)


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


def _hold(index: int, row: MeasuredRow, base: Machine) -> tuple[str, int, list[Work]]:
    try:
        cell = _HELD[index] = cell_of_row(row, base)
    except InfeasiblePlan as error:
        raise CalibrationError(
            f"line {row.line} of the table ran, and policy '{row.policy}' has no plan for it on "
            f"{base.name}: {error}"
        ) from None
    return repr(cell.key.plan), cell.tokens_per_step, works_of(cell.timed)


def _seconds(index: int, machine: Machine) -> float:
    return step_s(_HELD[index], machine)
