"""Processes that hold schedules of table rows and price them on the machines they are sent."""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Literal, Self

from twinstream.fidelity.cells import Cell, cell_of
from twinstream.fidelity.predict import step_s
from twinstream.hardware_profiles.calibration.search import Trial
from twinstream.hardware_profiles.calibration.timelines import works_of
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cost import Work
from twinstream.schedule.errors import TwinstreamError

_Message = tuple[Literal["cells", "seconds", "error"], object]


class CellWorkers:
    """A context: one process per CPU core, each with the schedules of its share of the rows.

    `keys[i]` is equal for rows of one schedule, `tokens_per_step[i]` a row's tokens of an optimizer
    step; `works` is what the schedules' kernels do.
    """

    def __init__(
        self, rows: Sequence[MeasuredRow], on_prediction: Callable[[], None] = lambda: None
    ) -> None:
        self._on_prediction = on_prediction
        num_workers = max(1, min(len(rows), os.cpu_count() or 1))
        self._owner = [index % num_workers for index in range(len(rows))]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for worker in range(num_workers):
            self._start({i: row for i, row in enumerate(rows) if self._owner[i] == worker})
        self.keys = [""] * len(rows)
        self.tokens_per_step = [0] * len(rows)
        self.works: list[Work] = []

    def __enter__(self) -> Self:
        for pipe in self._pipes:
            kind, found = _received(pipe)
            assert kind == "cells"
            assert isinstance(found, _Cells)
            for index, key in found.keys.items():
                self.keys[index] = key
                self.tokens_per_step[index] = found.tokens_per_step[index]
            self.works += found.works
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def seconds(self, trials: Sequence[Trial]) -> list[float]:
        """Predicted seconds of a step of each trial's row on its machine."""
        answers = [0.0] * len(trials)
        waiting: dict[Connection, list[int]] = {}
        for number, trial in enumerate(trials):
            waiting.setdefault(self._pipes[self._owner[trial.index]], []).append(number)
        for pipe, numbers in waiting.items():
            pipe.send([(trials[n].machine, trials[n].index) for n in numbers])
        while waiting:
            for ready in wait(list(waiting)):
                pipe = self._pipes[[id(p) for p in self._pipes].index(id(ready))]
                _, seconds = _received(pipe)
                assert isinstance(seconds, float)
                answers[waiting[pipe].pop(0)] = seconds
                self._on_prediction()
                if not waiting[pipe]:
                    del waiting[pipe]
        return answers

    def _start(self, rows: Mapping[int, MeasuredRow]) -> None:
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(target=_serve, args=(far, rows), daemon=True)
        process.start()
        far.close()
        self._pipes.append(near)
        self._processes.append(process)


class _Cells:
    """What a worker says of its cells once it has them."""

    def __init__(self, cells: Mapping[int, Cell]) -> None:
        self.keys = {index: repr(cell.key.plan) for index, cell in cells.items()}
        self.tokens_per_step = {i: cell.tokens_per_step for i, cell in cells.items()}
        self.works = [work for cell in cells.values() for work in works_of(cell.timed)]


def _serve(pipe: Connection, rows: Mapping[int, MeasuredRow]) -> None:
    """The worker: make the cells, then answer lists of (machine, row index) until terminated."""
    try:
        cells = {index: cell_of(row) for index, row in rows.items()}
        pipe.send(("cells", _Cells(cells)))
        while True:
            questions: list[tuple[Machine, int]] = pipe.recv()
            for machine, index in questions:
                pipe.send(("seconds", step_s(cells[index], machine)))
    except TwinstreamError as error:
        pipe.send(("error", str(error)))
    except (EOFError, KeyboardInterrupt):  # whoever asked has gone
        return


def _received(pipe: Connection) -> _Message:
    try:
        message: _Message = pipe.recv()
    except EOFError:
        raise CalibrationError("a worker process ended; was it short of memory?") from None
    if message[0] == "error":
        raise CalibrationError(str(message[1]))
    return message
