"""The rank of a training on one device: a thread of this process, talked to as processes are."""

import queue
import threading
from dataclasses import replace
from typing import Any

import torch

from twinstream.executor.launch.protocol import TrainTask
from twinstream.executor.launch.training_rank import TrainingRank
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.clocks import ClockOffset
from twinstream.executor.ranks.rank_run import RankOutcome
from twinstream.executor.ranks.resident import ResidentRank
from twinstream.executor.run.execute import execute_resident, prove
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.document import RankSchedule


class _ClosedError(Exception):
    """The trainer wants no more of the rank."""


class _LocalChannel:
    """The rank's end: messages are handed over as they are, and not copied."""

    def __init__(self) -> None:
        self.to_rank: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.from_rank: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_closed = False

    def check(self) -> None:
        if self.is_closed:
            raise _ClosedError

    def send(self, message: object) -> None:
        self.check()
        self.from_rank.put(message)

    def recv(self) -> Any:
        message = self.to_rank.get()
        if self.is_closed:
            self.to_rank.put(None)  # for the next thread that asks
            raise _ClosedError
        return message

    def close(self) -> None:
        self.is_closed = True
        self.to_rank.put(None)


class LocalRank:
    """Trains by a schedule of one device, in a thread.

    The thread is waited for as long as it takes: nobody else can be slow.
    """

    size = 1

    def __init__(self, schedule: RankSchedule, task: TrainTask, options: RunOptions) -> None:
        self._schedule, self._task, self._options = schedule, task, options
        self._channel = _LocalChannel()
        self._device = torch.cuda.current_device() if options.backend == "cuda" else 0
        self._thread = threading.Thread(target=self._run, name="twinstream-rank", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Return an empty list: the rank is a thread of this process."""
        return []

    def send(self, rank: int, message: object) -> None:
        assert rank == 0, "there is one rank"
        self._channel.to_rank.put(message)

    def recv(self, timeout_s: float | None = None) -> tuple[int, Any]:
        """The next message.

        Raises:
            TwinstreamError: what `execute_resident` raises, or a proof that fails.
        """
        message = self._channel.from_rank.get()
        if isinstance(message, BaseException):
            self._channel.from_rank.put(message)  # for who asks again: nothing else comes
            raise message
        return 0, message

    def close(self) -> None:
        """End it after the op that runs; nothing runs any more when this returns."""
        self._channel.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._device:  # a new thread has the first GPU
                torch.cuda.set_device(self._device)
            message: object = self._trained()
        except _ClosedError:
            return
        except BaseException as error:  # raised by `recv`
            message = error
        self._channel.from_rank.put(message)

    def _trained(self) -> RankOutcome:
        task, schedule, options = self._task, self._schedule, self._options
        evaluation = None if task.evaluation is None else task.evaluation.only
        for one in (schedule, flush_of(schedule), evaluation):
            if one is not None:
                prove(one, options.backend)
        part = RankPart.alone(schedule)
        inputs = TrainingRank(task, part, self._channel).inputs()
        work, between, fill = inputs.host_work, inputs.between, inputs.fill
        check = self._channel.check
        assert fill is not None, "the state comes from the trainer"

        def fill_rank(arenas: Arenas) -> None:
            fill(ResidentRank(part, arenas, RunOptions(options.backend, check=check), work))

        options = replace(options, between=between, check=check)
        timeline = execute_resident(schedule, fill_rank, work, options)
        return RankOutcome(0, "", {}, timeline, {}, (), ClockOffset(0, 0), scratch_bytes=0)
