"""How long a plan takes: an evaluator is a simulator that the front door passes in."""

from collections.abc import Callable
from typing import Protocol

from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import PassSpans

_STANDS_FOR_MORE = 2  # the round that further middle ones are like


class SimResult(Protocol):
    """The step time and the last passes of a simulated plan; a `Timeline` is one, too."""

    @property
    def step_ns(self) -> float:
        """The time of one step, in the steady state."""

    @property
    def passes(self) -> tuple[PassSpans, ...]:
        """The start and end of every op in the last passes."""


Evaluator = Callable[[RankSchedule, Machine], SimResult]


def step_ns_of(schedule: RankSchedule, result: SimResult, num_rounds: int) -> float:
    """Return the time of a step of `num_rounds`, of which the schedule has only a few.

    Each middle round that the schedule lacks adds the time between the ends of two middle rounds.
    """
    more = num_rounds - schedule.workload.rounds_per_step
    if more <= 0:
        return result.step_ns
    spans = result.passes[-1]
    end_of_round: dict[int, int] = {}
    for op, end_ns in zip(schedule.ops, spans.end_ns, strict=True):
        if isinstance(op, Compute) and op.label.round is not None:
            end_of_round[op.label.round] = end_ns
    between_ns = end_of_round[_STANDS_FOR_MORE] - end_of_round[_STANDS_FOR_MORE - 1]
    return result.step_ns + more * between_ns
