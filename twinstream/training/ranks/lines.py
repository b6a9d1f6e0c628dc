"""The trainer's side of the lines to its ranks: a thread for each answers what it asks."""

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Listener
from typing import Any, Protocol

from twinstream.schedule.errors import TwinstreamError
from twinstream.training.ranks.messages import (
    AtRest,
    DataOf,
    Evaluate,
    GoOn,
    IsDue,
    Losses,
    Put,
    Result,
    Take,
)

START_S = 600.0
"""For ranks to be warm and to have their state; who dies meanwhile is told at once."""
_KEY_BYTES = 32


class SilentRankError(TwinstreamError):
    """A rank keeps the others waiting for too long."""


class Answers(Protocol):
    """What the trainer does for its ranks; called in several threads."""

    def data(self, question: DataOf) -> Any:
        """A step's share."""

    def result(self, told: Result, rank: int) -> None:
        """A loss or a norm."""

    def is_due(self, step: int) -> bool:
        """Whether to rest after a step: the same for all ranks."""

    def at_rest(self, step: int, ranks: "Resting") -> bool:
        """All ranks are at rest; whether they go on."""


class Resting:
    """Ranks at rest, whose state may be read and written."""

    def __init__(self, lines: Mapping[int, Connection], timeout_s: float) -> None:
        self._lines, self._timeout_s = lines, timeout_s

    def take(self, rank: int, name: str) -> bytes:
        """A whole tensor of a rank's state.

        Raises:
            SilentRankError: the rank does not give it.
            EOFError: it has ended.
        """
        with _gone_is_the_end():
            self._lines[rank].send(Take(name))
            self._await(rank, f"'{name}'", self._timeout_s)
            return self._lines[rank].recv_bytes()

    def put(self, rank: int, name: str, content: Any) -> None:
        """A whole tensor of a rank's state."""
        self._lines[rank].send(Put(name))
        self._lines[rank].send_bytes(content)

    def evaluate(self, requests: Mapping[int, Evaluate]) -> dict[int, Losses]:
        """What all ranks answer; a pass may take as long as a step.

        Raises:
            SilentRankError: one does not.
            EOFError: one has ended.
        """
        with _gone_is_the_end():
            for rank, request in requests.items():
                self._lines[rank].send(request)
            found = {}
            for rank, request in requests.items():
                self._await(rank, "a loss", len(request.passes) * self._timeout_s)
                found[rank] = self._lines[rank].recv()
        return found

    def _await(self, rank: int, what: str, limit_s: float) -> None:
        if not self._lines[rank].poll(limit_s):
            raise SilentRankError(
                f"rank {rank} does not answer: {what} was asked of it {limit_s:g} s ago"
            )


@contextlib.contextmanager
def _gone_is_the_end() -> Iterator[None]:
    """An error of a line is not one of the disk."""
    try:
        yield
    except OSError as error:
        raise EOFError from error


class RankLines:
    """Waits for so many ranks, and answers them until they have ended.

    Args:
        on_failure: told once, in some thread, of the first thing that goes wrong here: it has to
            end the ranks.
        timeout_s: how long one may keep the others waiting.
    """

    def __init__(
        self, num_ranks: int, answers: Answers, on_failure: Callable[[], None], timeout_s: float
    ) -> None:
        self.key = secrets.token_bytes(_KEY_BYTES)
        self.error: BaseException | None = None
        self._num_ranks, self._answers, self._on_failure = num_ranks, answers, on_failure
        self._timeout_s = timeout_s
        self._lines: dict[int, Connection] = {}
        self._resting: dict[int, int] = {}
        self._goes_on, self._closed = True, False
        self._has_begun = False
        self._changed = threading.Condition()
        self._listener = Listener(family="AF_UNIX", authkey=self.key)
        self.address = str(self._listener.address)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """After all ranks have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.close()
        for line in self._lines.values():
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while len(self._lines) < self._num_ranks:
                line = self._listener.accept()
                rank = line.recv()
                self._lines[rank] = line
                threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def _serve(self, rank: int) -> None:
        line = self._lines[rank]
        try:
            with contextlib.suppress(EOFError, OSError):  # a rank that is gone: others notice
                while True:
                    line.send(self._answer(rank, line.recv()))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.error is not None:
                return
            self.error = error
            self._changed.notify_all()
        self._on_failure()

    def _answer(self, rank: int, question: object) -> object:
        match question:
            case DataOf():
                return self._answers.data(question)
            case Result():
                self._answers.result(question, rank)
                return None
            case IsDue():
                return self._answers.is_due(question.step)
            case AtRest():
                return GoOn(self._rested(rank, question.step))
        raise AssertionError(f"a rank asks {question!r}")

    def _rested(self, rank: int, step: int) -> bool:
        """The last that comes to rest has the work done, and the others are waited for."""
        with self._changed:
            self._resting[rank] = step
            if len(self._resting) < self._num_ranks:
                self._wait_for_rest(rank, step)
                return self._goes_on
            self._changed.notify_all()
        assert set(self._resting.values()) == {step}, "ranks rest after one step"
        goes_on = self._answers.at_rest(step, Resting(self._lines, self._timeout_s))
        with self._changed:
            self._goes_on, self._has_begun = goes_on, True
            self._resting.clear()
            self._changed.notify_all()
        return goes_on

    def _wait_for_rest(self, rank: int, step: int) -> None:
        def over() -> bool:
            return rank not in self._resting or self.error is not None or self._closed

        def all_there() -> bool:
            return len(self._resting) == self._num_ranks or over()

        limit_s = self._timeout_s if self._has_begun else START_S
        if not self._changed.wait_for(all_there, limit_s):
            late = sorted(set(range(self._num_ranks)) - set(self._resting))
            raise SilentRankError(
                f"rank {late[0]} does not answer: rank {rank} is through with step {step}, and it "
                f"not {limit_s:g} s later"
            )
        self._changed.wait_for(over)
        if rank in self._resting:
            raise EOFError


@contextlib.contextmanager
def rank_lines(
    num_ranks: int, answers: Answers, on_failure: Callable[[], None], timeout_s: float
) -> Iterator[RankLines]:
    """Lines that are closed afterwards."""
    lines = RankLines(num_ranks, answers, on_failure, timeout_s)
    try:
        yield lines
    finally:
        lines.close()
