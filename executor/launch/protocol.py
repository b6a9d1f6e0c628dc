"""All messages between a run and its ranks, and how they pass through a pipe.

The launcher sends a rank a `RunTask`, and the rank answers with a `RankOutcome` or a `RankFailure`.
At any time the launcher may ask `WhatBlocks`, which is answered with `BlockedOps`.

In a training the rank asks for what each step is fed (`GetBatch`), reports losses and norms
(`StepResult`), and asks before it begins another step whether to pause (`ShouldPause`). Once all
its passes are complete it says `AtBoundary`. From then on the trainer asks: `ReadTensor`,
`WriteTensor` and `Evaluate`, each of which is answered, until `Continue`.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from twinstream.executor.program.options import RunOptions
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.document import Schedule

if TYPE_CHECKING:  # who trains imports this file, and no torch with it
    import torch

    from twinstream.executor.ranks.rank_run import RankInputs
    from twinstream.executor.ranks.waiting import Wait
    from twinstream.executor.ranks.world import Patience, StoreAddress
    from twinstream.executor.run.evaluation import PassLoss
    from twinstream.executor.weights.disk_reader import DiskFiles

_COUNT_BYTES = 4

MakeInputs = Callable[[RankPart], "RankInputs"]
"""Called in the rank's process, so it pickles: a function of a module, or a `partial` of one."""


class RankChannel(Protocol):
    """A rank's end of the way to the one that trains with it."""

    def send(self, message: object) -> None:
        """Send a message to the other side; several threads may call this."""

    def recv(self) -> Any:
        """The next message for the rank's training, waited for."""


class Ranks(Protocol):
    """The trainer's end of the channels to all its ranks."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks; none where the rank is a thread of this process."""

    def send(self, rank: int, message: object) -> None:
        """Send to one rank. What is wrong with the rank is raised by `recv`."""

    def recv(self, timeout_s: float | None = None) -> tuple[int, Any] | None:
        """The next message of any rank that has not ended; None where none comes in time.

        Raises:
            TwinstreamError: a rank has failed: why.
        """

    def close(self) -> None:
        """End the processes of all ranks, whatever they are doing."""


# From the launcher to a rank, and back


@dataclass(frozen=True)
class TrainTask:
    """The task of a rank that trains, sent before its first step; all else it asks for.

    Attributes:
        first, last: the steps that it trains.
        rate: the learning rate by step.
        max_norm: of a step's gradients; 0 is any.
        evaluation: the schedule of an evaluation, of all ranks; None where there is none.
        buffers: of a traced model's module, where a folder has them.
        disk: by rank the files of what is at home on a disk; empty where nothing is.
    """

    first: int
    last: int
    rate: Callable[[int], float]
    seed: int
    max_norm: float
    evaluation: Schedule | None
    buffers: "Mapping[str, torch.Tensor]" = field(default_factory=dict)
    disk: "tuple[DiskFiles, ...]" = ()

    @property
    def num_passes(self) -> int:
        """One more than steps; it is never begun, so that ranks pause after the last step, too."""
        return 2 + self.last - self.first


@dataclass(frozen=True)
class RunTask:
    """One run: of which schedule, on which rank, with what; `name` is that of the run in the store
    where ranks meet."""

    schedule: Schedule
    work: MakeInputs | TrainTask
    options: RunOptions
    rank: int
    name: str
    store: "StoreAddress"
    patience: "Patience"


@dataclass(frozen=True)
class RankFailure:
    """Why a rank's run ended.

    `refused` has the text of an error that a user can act on; `bug` of one of ours, with `details`.
    `rank` is added to the text where it does not name one.
    """

    rank: int
    kind: Literal["timeout", "lost", "refused", "bug"]
    text: str
    op_id: str | None = None
    peers: tuple[int, ...] = ()
    details: str = ""


@dataclass(frozen=True)
class WhatBlocks:
    """Asks a rank's process which ops its streams wait in, now."""


@dataclass(frozen=True)
class BlockedOps:
    """The ops that the streams of a rank wait in."""

    rank: int
    now: "tuple[Wait, ...]"


@dataclass(frozen=True)
class Note:
    """A line from a rank about what slows it down, at any time. There is no answer."""

    text: str


# From a rank that trains to its trainer


@dataclass(frozen=True)
class GetBatch:
    """Asks for what the rank's replica is fed of a step; the answer is a `Batch`."""

    step: int


@dataclass(frozen=True)
class StepResult:
    """Reports a loss or a norm of a step, or log-probabilities of a chunk. There is no answer."""

    sink: str
    step: int
    value: float | NDArray[np.float32]


@dataclass(frozen=True)
class ShouldPause:
    """Asks whether to pause after a step, before the next one is begun; the answer is a bool."""

    step: int


@dataclass(frozen=True)
class AtBoundary:
    """Nothing runs on the rank, and all of a step is done.

    After the step before the first one the state is not there yet.
    """

    step: int


@dataclass(frozen=True)
class TensorBytes:
    """Answers `ReadTensor`: 1-D uint8, to be read before the rank goes on."""

    flat: NDArray[np.uint8]


@dataclass(frozen=True)
class Written:
    """Answers `WriteTensor`: the tensor is in its place."""


@dataclass(frozen=True)
class Losses:
    """Answers `Evaluate`: a replica's share of each pass; empty where the rank has no head."""

    passes: "tuple[PassLoss, ...]"


# From the trainer to a rank


@dataclass(frozen=True)
class Batch:
    """The data that a rank's replica is fed in one step, or in one pass of an evaluation.

    Attributes:
        tokens: of each chunk ids and labels, int32 [2, chunk_tokens].
        lengths: of each chunk's sequences, where sequences are packed.
        num_targets: labels that count, of all replicas; of a loss of pairs, pairs.
        reference: of a loss of pairs, of those of each chunk, float32 [2, pairs].
        samples: of each chunk the tensors of its samples, by name, where the model takes some.
    """

    tokens: tuple[NDArray[np.int32], ...]
    lengths: tuple[tuple[int, ...], ...] | None
    num_targets: int
    reference: tuple[NDArray[np.float32], ...] | None = None
    samples: tuple[Mapping[str, NDArray[Any]], ...] | None = None


@dataclass(frozen=True)
class ReadTensor:
    """Asks for one whole tensor of the rank's state, or its bytes from `start` to `stop`."""

    name: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class WriteTensor:
    """Gives one whole tensor of the rank's state, 1-D uint8."""

    name: str
    flat: NDArray[np.uint8]


@dataclass(frozen=True)
class Evaluate:
    """Asks for the loss of the state over these passes; all ranks are asked at the same time."""

    passes: tuple[Batch, ...]


@dataclass(frozen=True)
class Continue:
    """The pause is over; so is the run where it does not go on."""

    goes_on: bool


def send(pipe: Connection, message: object) -> None:
    """Write a message. Its arrays follow as they are, without a copy of them here."""
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    pipe.send_bytes(len(arrays).to_bytes(_COUNT_BYTES, "big") + head)
    for array in arrays:
        pipe.send_bytes(array.raw())


def recv(pipe: Connection) -> Any:
    """The next message; its arrays may be written to.

    Raises:
        EOFError: the other end is gone.
    """
    head = pipe.recv_bytes()
    count = int.from_bytes(head[:_COUNT_BYTES], "big")
    arrays = [bytearray(pipe.recv_bytes()) for _ in range(count)]
    return pickle.loads(memoryview(head)[_COUNT_BYTES:], buffers=arrays)
