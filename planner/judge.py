"""The judge of plans: a simulator, passed in by the front door."""

from collections.abc import Callable
from typing import Protocol

from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import PassSpans

_STANDS_FOR_MORE = 2  # the round that further middle ones are like


class Verdict(Protocol):
    """What a judge says: the step time, and the last passes; a `Timeline` says it, too."""

    @property
    def step_ns(self) -> float:
        """How long a step takes."""

    @property
    def passes(self) -> tuple[PassSpans, ...]:
        """Start and end of every op, in the last passes."""


Judge = Callable[[Schedule, Machine], Verdict]


def step_ns_of(schedule: Schedule, verdict: Verdict, num_rounds: int) -> float:
    """Step time on the few rounds of a schedule, and what each further middle round adds."""
    more = num_rounds - schedule.workload.rounds_per_step
    if more <= 0:
        return verdict.step_ns
    spans = verdict.passes[-1]
    end_of_round: dict[int, int] = {}
    for op, end_ns in zip(schedule.ops, spans.end_ns, strict=True):
        if isinstance(op, Compute) and op.label.round is not None:
            end_of_round[op.label.round] = end_ns
    between_ns = end_of_round[_STANDS_FOR_MORE] - end_of_round[_STANDS_FOR_MORE - 1]
    return verdict.step_ns + more * between_ns
