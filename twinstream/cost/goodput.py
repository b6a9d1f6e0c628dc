"""Goodput: the share of a run's wall time that trains, with checkpoints and failures."""

from math import sqrt
from typing import Annotated, Self

from pydantic import Field, model_validator

from twinstream.cost.refusal import CostError
from twinstream.schedule.node import Node

_Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_PositiveSeconds = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class Interruptions(Node):
    """What keeps a run from training: its checkpoints, and failures of any of its devices.

    Fields:
        checkpoint_s: time that the run stands still for a checkpoint.
        interval_s: time from checkpoint to checkpoint.
        restart_s: time from a failure until the run trains again.
        mtbf_s: mean time between failures of the whole run; None if it never fails.
    """

    checkpoint_s: _Seconds
    interval_s: _PositiveSeconds
    restart_s: _Seconds = 0.0
    mtbf_s: _PositiveSeconds | None = None

    @model_validator(mode="after")
    def _trains_at_all(self) -> Self:
        if self.goodput <= 0:
            raise CostError(
                f"checkpoints of {self.checkpoint_s:g} s every {self.interval_s:g} s and restarts "
                f"of {self.restart_s:g} s with {_failures(self.mtbf_s)} leave no time to train: "
                "goodput would be at or below zero"
            )
        return self

    @property
    def goodput(self) -> float:
        """1 - d/t - (t/2 + R)/M: a failure costs half an interval of work and the restart.

        Checkpoint time d, interval t, restart R, mean time between failures M. To first order:
        no second failure before the next checkpoint.

        Source: Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006.

        >>> Interruptions(checkpoint_s=30, interval_s=900, restart_s=360, mtbf_s=10800).goodput
        0.8916666666666667
        """
        share = 1 - self.checkpoint_s / self.interval_s
        if self.mtbf_s is not None:
            share -= (self.interval_s / 2 + self.restart_s) / self.mtbf_s
        return share


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The interval of the greatest goodput: sqrt(2 d M).

    Source: Young, CACM 17(9), 1974.

    >>> best_interval_s(50.0, 10000.0)
    1000.0
    """
    if not (checkpoint_s > 0 and mtbf_s > 0):
        raise CostError(
            f"checkpoints of {checkpoint_s:g} s and failures every {mtbf_s:g} s have no best "
            "interval: both need to be more than 0, or say --checkpoint-interval-s"
        )
    return sqrt(2 * checkpoint_s * mtbf_s)


def _failures(mtbf_s: float | None) -> str:
    return "no failures" if mtbf_s is None else f"a failure every {mtbf_s:g} s"
