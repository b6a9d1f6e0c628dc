"""A plan as the judge found it: its step time, and how to make it of any number of rounds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emit.emission import Placement
from twinstream.planner.judge import Judged
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute

_STANDS_FOR_MORE = 2  # the round that further middle ones are like
MENDED = 1.005  # a plan may be so much slower that is packed with less than 3 % waste instead

Maker = Callable[[Chain], Schedule]


@dataclass(frozen=True)
class Plan:
    """How to make a schedule of a chain of any number of rounds, and its step time as judged.

    `theirs`: it is another policy's. `tighter` finds one that is nearly as fast and takes less
    memory, if it wastes any; `wasteful` says whether packing wastes over 3 % of it.
    """

    step_ns: float
    make: Maker
    theirs: bool = False
    tighter: Callable[[], "Plan | None"] | None = None
    wasteful: Callable[[], bool] = lambda: False

    def tightened(self, others: Iterable["Plan"]) -> "Plan":
        """This plan, or a tighter one, if that is not slower than any by another policy."""
        tighter = self.tighter() if self.tighter is not None else None
        theirs_ns = fastest_ns([plan for plan in others if plan.theirs])
        return self if tighter is None or tighter.step_ns > theirs_ns else tighter


def tightest(plans: Sequence[Plan]) -> Plan:
    """The first plan, tightened; if much is wasted even so, the next that is nearly as fast.

    Never one that is slower than another policy's.

    Args:
        plans: of one chain, the fastest first.
    """
    most_ns = MENDED * plans[0].step_ns
    slowest_ns = min(most_ns, fastest_ns([plan for plan in plans if plan.theirs]))
    near = (plan.tightened(plans) for plan in plans if plan.step_ns <= slowest_ns)
    first = next(near)
    tight = (plan for plan in chain([first], near) if plan.step_ns <= most_ns)
    return next((plan for plan in tight if not plan.wasteful()), first)


def fastest_ns(plans: Sequence[Plan]) -> float:
    return min((plan.step_ns for plan in plans), default=inf)


def step_ns(schedule: Schedule, judged: Judged, num_rounds: int) -> float:
    """Step time on the few rounds of a schedule, and what each further middle round adds."""
    more = num_rounds - schedule.workload.rounds_per_step
    if more <= 0:
        return judged.step_ns
    spans = judged.passes[-1]
    end_of_round: dict[int, int] = {}
    for op, end_ns in zip(schedule.ops, spans.end_ns, strict=True):
        if isinstance(op, Compute) and op.label.round is not None:
            end_of_round[op.label.round] = end_ns
    between_ns = end_of_round[_STANDS_FOR_MORE] - end_of_round[_STANDS_FOR_MORE - 1]
    return judged.step_ns + more * between_ns


def alone_ns(placement: Placement, machine: Machine, num_rounds: int) -> float:
    """What a step's tasks take alone, which is no more than `step_ns`."""
    chain = placement.chain
    more = max(0, num_rounds - chain.workload.rounds_per_step)
    call_ns = {name: cost_alone_ns(call.cost, machine) for name, call in chain.calls.items()}
    return sum(
        call_ns[task.call] * (1 + more if task.label.round == _STANDS_FOR_MORE else 1)
        for task in placement.tasks
    )
