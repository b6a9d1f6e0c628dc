"""What a rank's process asks the one that trains with it, and what that asks back.

A rank asks, one question at a time, and is answered. At rest it is the one that is asked.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinstream.data.packing import Chunk
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.training.rates import LearningRate

if TYPE_CHECKING:
    from twinstream.executor.run.evaluation import PassLoss


@dataclass(frozen=True)
class RankTask:
    """What a rank needs to know before its first step; all else it is told.

    A replica computes `chunks` of a step's; `last` is the last step; `evaluation` is the schedule
    of all ranks, if there is anything to evaluate.
    """

    address: str
    key: bytes
    first: int
    last: int
    chunks: int
    pieces: int
    rate: LearningRate
    seed: int
    packed: bool
    max_norm: float
    evaluation: ClusterSchedule | None


@dataclass(frozen=True)
class DataOf:
    """Asks for the data of a step, from its chunk number `begin` on."""

    step: int
    begin: int


@dataclass(frozen=True)
class StepShare:
    """A replica's chunks of a step; `targets` are the labels that count of all of the step."""

    chunks: tuple[Chunk, ...]
    targets: int


@dataclass(frozen=True)
class Result:
    """Tells a loss or a norm."""

    sink: str
    step: int
    value: float


@dataclass(frozen=True)
class IsDue:
    """Asks whether to rest after a step."""

    step: int


@dataclass(frozen=True)
class AtRest:
    """Nothing runs; after step 0 (of this start) the state is not there yet."""

    step: int


@dataclass(frozen=True)
class Take:
    """Asks a rank at rest for one whole tensor of its state, which is sent as bytes."""

    name: str


@dataclass(frozen=True)
class Put:
    """Gives a rank at rest one whole tensor of its state, whose bytes follow."""

    name: str


@dataclass(frozen=True)
class Evaluate:
    """Asks all ranks at rest for the loss of their state over these passes."""

    passes: tuple[StepShare, ...]


@dataclass(frozen=True)
class Losses:
    """Of each pass a replica's share; empty where the rank has no head."""

    passes: "tuple[PassLoss, ...]"


@dataclass(frozen=True)
class GoOn:
    """The rest is over, and perhaps the run."""

    goes_on: bool
