"""What a rank's process and the one that started it tell each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.rank_run import RankInputs
from twinstream.executor.ranks.waiting import Wait
from twinstream.executor.ranks.world import Patience
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.projecting import RankPart

MakeInputs = Callable[[RankPart], RankInputs]
"""Called in the rank's process, so it pickles: a function of a module, or a `partial` of one."""
ASK = "ask"  # what the rank's process waits for, now


@dataclass(frozen=True)
class Job:
    """One run: of which schedule, on which rank, with what; `name` is that of the run."""

    schedule: ClusterSchedule
    make: MakeInputs
    options: RunOptions
    rank: int
    name: str
    port: int
    patience: Patience


@dataclass(frozen=True)
class Trouble:
    """Why a rank's run ended. `rank` is told where the text does not name it.

    `told` is the text of an error that a user can act on; `bug` of one of ours, with `details`.
    """

    rank: int
    kind: Literal["timeout", "lost", "told", "bug"]
    text: str
    op_id: str | None = None
    peers: tuple[int, ...] = ()
    details: str = ""


@dataclass(frozen=True)
class Waits:
    """What the streams of a rank wait for."""

    rank: int
    now: tuple[Wait, ...]
