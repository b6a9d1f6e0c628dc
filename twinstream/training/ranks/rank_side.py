"""A rank in training: feeds its replica's share of the data, and keeps its stage's state."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, Any

from twinstream.schedule.cluster.projecting import RankPart, rank_part
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Fetch
from twinstream.training.ranks.messages import (
    AtRest,
    DataOf,
    Evaluate,
    GoOn,
    IsDue,
    Losses,
    Put,
    RankTask,
    Result,
    StepShare,
    Take,
)
from twinstream.training.run.batches import KEPT_STEPS, tokens_of
from twinstream.training.run.evaluating import batch_of

if TYPE_CHECKING:
    from twinstream.executor.program.host_work import HostWork
    from twinstream.executor.ranks.rank_run import RankInputs
    from twinstream.executor.ranks.resident import ResidentRank


class Line:
    """To the process that trains with this rank: one question at a time."""

    def __init__(self, address: str, key: bytes, rank: int) -> None:
        self._lock = threading.Lock()
        try:
            self._connection = Client(address, "AF_UNIX", authkey=key)
            self._connection.send(rank)
        except OSError as error:
            raise TwinstreamError(f"rank {rank} cannot reach its trainer: {error}") from None

    def ask(self, question: object) -> Any:
        """The answer."""
        with self._lock, _told_if_gone():
            self._connection.send(question)
            return self._connection.recv()

    def hear(self) -> Any:
        """What is asked or said next."""
        with _told_if_gone():
            return self._connection.recv()

    def tell(self, answer: object) -> None:
        """To what was asked."""
        with _told_if_gone():
            self._connection.send(answer)

    def take(self) -> bytes:
        """The bytes that come next."""
        with _told_if_gone():
            return self._connection.recv_bytes()

    def give(self, content: Any) -> None:
        """Bytes."""
        with _told_if_gone():
            self._connection.send_bytes(content)


@contextmanager
def _told_if_gone() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise TwinstreamError("the process that trains is gone") from None


class RankSide:
    """One rank of a run.

    Args:
        part: what it does of each step.
    """

    def __init__(self, task: RankTask, part: RankPart) -> None:
        self._task, self._part = task, part
        self._line = Line(task.address, task.key, part.rank)
        self._begin = part.coordinates.get("dp", 0) * task.chunks
        self._steps: dict[int, StepShare] = {}
        self._data = threading.Lock()

    def inputs(self) -> "RankInputs":
        """What the rank's run begins with."""
        from twinstream.executor.ranks.rank_run import RankInputs

        return RankInputs(self._host_work(), between=self._between, fill=self._fill)

    def _share(self, step: int) -> StepShare:
        with self._data:
            if step not in self._steps:
                self._steps[step] = self._line.ask(DataOf(step, self._begin))
                self._steps.pop(step - KEPT_STEPS, None)
            return self._steps[step]

    def _host_work(self) -> "HostWork":
        """Feeds data; tells losses and norms."""
        import torch

        from twinstream.executor.run.training import Training

        task = self._task
        training = Training(
            lambda step, index: torch.from_numpy(
                tokens_of(self._share(step).chunks, index, task.pieces)
            ),
            task.rate,
            task.seed,
            first_step=task.first,
            lengths=self._lengths if task.packed else None,
            num_targets=lambda step: self._share(step).targets,
            max_norm=task.max_norm,
        )
        work = training.host_work(self._part.schedule)

        def fetch(op: Fetch, pass_index: int, taken: Any) -> None:
            work.fetch(op, pass_index, taken)
            values = training.losses if op.sink == "loss" else training.norms
            self._line.ask(Result(op.sink, task.first + pass_index, values.pop()))

        return replace(work, fetch=fetch)

    def _lengths(self, step: int, index: int) -> tuple[int, ...]:
        return self._share(step).chunks[index].lengths

    def _fill(self, rank: "ResidentRank") -> None:
        """The state comes from the trainer, which reads the files or draws it."""
        self._rank = rank
        self._rest(self._task.first - 1)

    def _between(self, number: int, rest: Callable[[], None]) -> bool:
        """Before another pass; the state may be read after `rest`."""
        step = self._task.first - 1 + number
        if not self._line.ask(IsDue(step)):
            return True
        rest()
        return self._rest(step)

    def _rest(self, step: int) -> bool:
        """Do what is asked until the rest is over; whether the run goes on."""
        request = self._line.ask(AtRest(step))
        while True:
            match request:
                case Take():
                    self._line.give(self._rank.take(request.name).numpy().data)
                case Put():
                    self._rank.put(request.name, _flat(self._line.take()))
                case Evaluate():
                    self._line.tell(self._losses(request))
                case GoOn():
                    return request.goes_on
            request = self._line.hear()

    def _losses(self, request: Evaluate) -> Losses:
        evaluation = self._task.evaluation
        assert evaluation is not None, "who asks for it has sent it"
        part = rank_part(evaluation, self._part.rank)
        pieces, packed = self._task.pieces, self._task.packed
        batches = [batch_of(one.chunks, one.targets, pieces, packed) for one in request.passes]
        return Losses(tuple(self._rank.evaluate(part, batches)))


def _flat(content: bytes) -> Any:
    """1-D uint8."""
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def rank_inputs(task: RankTask, part: RankPart) -> "RankInputs":
    """Called in the rank's process."""
    return RankSide(task, part).inputs()
