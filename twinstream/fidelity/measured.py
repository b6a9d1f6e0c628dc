"""Measured rows of any kind, and the processes that predict them.

A kind of rows is one class that follows `PredictableRow`: published steps of clusters,
lines of a table of speeds. What validates or fits asks nothing else of a row.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.planner.planner import gc_paused
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.worker_processes import ForkedWorkerContext, ignore_interrupts

Profile = TypeVar("Profile")
_Profile = TypeVar("_Profile", contravariant=True)
_Answer = TypeVar("_Answer")
_FEW = 4  # questions that are answered before processes have started
_HELD: dict[int, Any] = {}  # what this process has made of rows, where it is a worker


class Predicted(Node):
    """A predicted step as it is kept; None where a kind of rows does not predict it.

    `refused` says why the row would not run, `unknown` what nobody here knows of it.
    """

    step_s: float | None = None
    tokens_per_s: float | None = None
    stall: float | None = None
    fits: bool | None = None
    memory_bytes: int | None = None
    room_bytes: int | None = None
    activation_bytes: int | None = None
    refused: str = ""
    unknown: str = ""


class Ready(Protocol[_Profile]):
    """The schedules of a row, made once and timed on one profile after the other.

    `step_s` predicts the seconds of a step alone, `predicted` all that is kept.
    """

    def predicted(self, profile: _Profile) -> Predicted: ...

    def step_s(self, profile: _Profile) -> float: ...


class PredictableRow(Protocol[_Profile]):
    """A measured row: what was measured, and how it is predicted.

    `identity` is equal for the same row alone; `measured` is None where there is nothing to compare
    with, and `value_in` a prediction is the same figure; `effort` says about how long predictions
    take beside each other. `ready` makes the schedules, for this profile where that matters;
    `refusal` is the reason where an error means that the row would not run, else None.
    """

    @property
    def identity(self) -> Hashable: ...

    @property
    def measured(self) -> float | None: ...

    @property
    def effort(self) -> float: ...

    def value_in(self, predicted: Predicted) -> float | None: ...

    def ready(self, profile: _Profile) -> Ready[_Profile]: ...

    def refusal(self, error: TwinstreamError) -> str | None: ...


Row = PredictableRow[Any]
Question = Callable[[Row, Callable[[], Ready[Any]], Any], _Answer]


def predicted(row: Row, ready: Callable[[], Ready[Any]], profile: Any) -> Predicted:
    """Predict a row on a profile, or say why it would not run."""
    try:
        return ready().predicted(profile)
    except TwinstreamError as error:
        why = row.refusal(error)
        if why is None:
            raise
        return Predicted(refused=why)


def seconds(row: Row, ready: Callable[[], Ready[Any]], profile: Any) -> float:
    """Predict the seconds of a row's step."""
    return ready().step_s(profile)


class Predictors:
    """A context: processes that answer questions about rows, one a core by default.

    With `hold` a row's schedules stay with the process that made them, and each further question
    about the row goes there. Few questions, or those of one job, are answered in this process.
    """

    def __init__(self, jobs: int | None = None, *, hold: bool = False) -> None:
        self._hold, count = hold, jobs or os.cpu_count() or 1
        # Forked from a server, which has no thread of a progress bar.
        context = ForkedWorkerContext(__name__)
        pools, each = (count, 1) if hold else (1, count)
        self._pools = [
            ProcessPoolExecutor(each, mp_context=context, initializer=ignore_interrupts)
            for _ in range(pools)
        ]
        self._alone = count == 1 and not hold
        self._places: dict[Hashable, int] = {}
        self._rows: list[Row] = []  # kept, so that no other row takes an identity

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def ask(
        self,
        question: Question[_Answer],
        asked: Sequence[tuple[Row, Any]],
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[_Answer]:
        """Answer a question about each row on its profile; `on_answer` is called after each.

        Raises:
            CalibrationError: a process ended.
        """
        if self._alone or (not self._hold and len(asked) <= _FEW):
            answers = []
            for row, profile in asked:
                answers.append(_answer(question, row, profile, None))
                on_answer()
            return answers
        futures = []
        for row, profile in asked:
            place = self._place(row)
            pool = self._pools[place % len(self._pools)]
            futures.append(
                pool.submit(_answer, question, row, profile, place if self._hold else None)
            )
        try:
            for future in as_completed(futures):
                future.result()
                on_answer()
        except BrokenProcessPool:
            raise CalibrationError("a worker process ended; was it short of memory?") from None
        return [future.result() for future in futures]

    def _place(self, row: Row) -> int:
        if row.identity not in self._places:
            self._places[row.identity] = len(self._rows)
            self._rows.append(row)
        return self._places[row.identity]


def _answer(question: Question[_Answer], row: Row, profile: Any, place: int | None) -> _Answer:
    with gc_paused():
        if place is None:
            return question(row, partial(row.ready, profile), profile)
        return question(row, partial(_held, row, profile, place), profile)


def _held(row: Row, profile: Any, place: int) -> Ready[Any]:
    if place not in _HELD:
        _HELD[place] = row.ready(profile)
    return _HELD[place]  # type: ignore[no-any-return]
