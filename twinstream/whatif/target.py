"""The smallest memory or link with which a step reaches a throughput."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Protocol

from twinstream.hardware_profiles.cost import call_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Compute
from twinstream.sweep.workers import in_processes
from twinstream.whatif.properties import (
    Property,
    changed,
    properties_of,
    value_of,
    yield_of,
)

SEARCHED = ("device memory", "host memory", "PCIe, all three")
_CLOSE = 1.02
_NEAR = _CLOSE**0.75  # beside an end: where it moves the other end, that is the answer
_MOST_DOUBLINGS = 5
_MOST_HALVINGS = 6
_TARGET = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*(%|(?:tok|tokens)/s)")


class TargetError(TwinstreamError):
    """A target that cannot be read."""


class Reached(Node):
    """The smallest value of a property that reaches the target, everything else as it is.

    It lies within 2 % above the smallest that quick effort finds; but where `less_may_do`, every
    smaller value that was tried reached the target, too. `value` is None
    where the property alone never reaches it; `tokens_per_s` is then the most that was found, at
    `tried` of `unit`.
    """

    name: str
    unit: str
    now: float
    value: float | None
    tried: float
    tokens_per_s: float
    less_may_do: bool = False


class TargetFound(Node):
    """What reaches a throughput; `compute_limit_tokens_per_s` is what percentages are of."""

    target_tokens_per_s: float
    compute_limit_tokens_per_s: float
    base: Summary
    found: tuple[Reached, ...]
    uncertainty: Uncertainty


def compute_limit(schedule: Schedule, machine: Machine) -> float:
    """Tokens/s if compute never waited and nothing were recomputed: all tasks, each alone.

    Raises:
        TargetError: computing takes no time.
    """
    alone_ns = {name: call_alone_ns(call, machine) for name, call in schedule.calls.items()}
    total_ns = sum(
        alone_ns[op.call]
        for op in schedule.ops
        if isinstance(op, Compute)
        and op.label.kind != "block_recompute"
        and schedule.calls[op.call].processor == "device"
    )
    if not total_ns:
        raise TargetError(
            f"computing takes no time on machine '{machine.name}', so that it limits nothing: "
            "state its peak_bf16_flop_per_s"
        )
    return schedule.workload.tokens_per_step / total_ns * 1e9


def check_target(text: str) -> None:
    """Raise TargetError where `target_of` would."""
    target_of(text, 1.0)


def target_of(text: str, limit_tokens_per_s: float) -> float:
    """Tokens/s of `12000tok/s`, or of `95%` of a limit.

    >>> target_of("12,000 tok/s", 1.0), target_of("95%", 1000.0)
    (12000.0, 950.0)

    Raises:
        TargetError: the text is neither.
    """
    match = _TARGET.fullmatch(text.strip())
    number = float(re.sub("[_,]", "", match[1])) if match else 0.0
    if match is None or number <= 0 or (match[2] == "%" and number >= 100):
        raise TargetError(
            f"cannot read the target '{text}'; write it as 12000tok/s, or as 95% of what the "
            "machine's compute could do without waits and recompute (less than 100%)"
        )
    return number / 100 * limit_tokens_per_s if match[2] == "%" else number


@dataclass(frozen=True)
class _Search:
    request: PlanRequest
    one: Property
    target_tokens_per_s: float
    reached_now: bool
    tokens_per_s: float
    schedule: Schedule


def search_target(
    planner: Planner,
    request: PlanRequest,
    text: str,
    num_jobs: int = 1,
    on_found: Callable[[], None] = lambda: None,
) -> TargetFound:
    """Search the smallest device memory, host memory and link, each alone, for a target.

    The search is with quick effort; what it finds is confirmed with the effort of the request.

    Args:
        planner: of the plan with nothing changed.
        request: what to plan.
        text: the target, as `target_of` reads it.
        num_jobs: processes.
        on_found: called after each.

    Raises:
        TwinstreamError: the target cannot be read, or the plan with nothing changed not be made.
    """
    schedule = planner.plan(request)
    request = request.with_tokens(schedule.workload.tokens_per_step)
    base = yield_of(schedule, request)
    limit = compute_limit(schedule, request.machine)
    target = target_of(text, limit)
    reached = base.tokens_per_s >= target
    searches = [
        _Search(request, one, target, reached, base.tokens_per_s, schedule)
        for one in _searched_of(request)
    ]
    found: dict[str, Reached] = {}
    for search, outcome in in_processes(_searched, searches, num_jobs):
        if isinstance(outcome, BaseException):
            raise outcome
        found[search.one.name] = outcome
        on_found()
    return TargetFound(
        target_tokens_per_s=target,
        compute_limit_tokens_per_s=limit,
        base=base,
        found=tuple(found[search.one.name] for search in searches),
        uncertainty=uncertainty_of(request.machine, schedule),
    )


def num_searches(request: PlanRequest) -> int:
    """How many properties `search_target` searches."""
    return len(_searched_of(request))


def _searched_of(request: PlanRequest) -> list[Property]:
    return [one for one in properties_of(request) if one.name in SEARCHED]


class Tried(Protocol):
    """Which factors of a property were tried."""

    speeds: dict[float, float]

    def reaches(self, factor: float) -> bool: ...


class _Tried:
    """What throughput came of which factor, and the plans; less that was tried is known to more."""

    def __init__(self, search: _Search, request: PlanRequest, planner: Planner) -> None:
        self._search, self._request, self._planner = search, request, planner
        self.speeds = {1.0: search.tokens_per_s}
        self.plans = {1.0: search.schedule}

    def reaches(self, factor: float) -> bool:
        if factor not in self.speeds:
            self.speeds[factor] = self._planned(factor)
        return self.speeds[factor] >= self._search.target_tokens_per_s

    @property
    def best(self) -> float:
        """The factor of the most throughput."""
        return max(self.speeds, key=lambda factor: self.speeds[factor])

    def _planned(self, factor: float) -> float:
        request = changed(self._request, self._search.one, factor)
        less = max((known for known in self.plans if known <= factor), default=None)
        known = [] if less is None else [self.plans[less]]
        try:
            plan = self._planner.plan(request, known, name_caps=False)
        except TwinstreamError:
            return 0.0
        self.plans[factor] = plan
        return yield_of(plan, request).tokens_per_s


def _searched(search: _Search, planner: Planner) -> Reached:
    """Double or halve until the target lies between, and close in on it; with quick effort.

    What is found is then confirmed with the effort asked for.
    """
    quick = search.request.with_effort("quick")
    tried = _Tried(search, quick, planner)
    low, high = bracket(tried.reaches, search.reached_now)
    if low is not None and high is not None:
        high = closed_in(tried, search.target_tokens_per_s, low, high)
    if quick != search.request:
        best = high if high is not None else tried.best
        confirmed = _Tried(search, search.request, planner)
        confirmed.plans |= tried.plans
        high, tried = (best if confirmed.reaches(best) else None), confirmed
    now = value_of(search.request, search.one) / search.one.unit_size
    best = high if high is not None else tried.best
    return Reached(
        name=search.one.name,
        unit=search.one.unit,
        now=now,
        value=None if high is None else now * high,
        tried=now * best,
        tokens_per_s=tried.speeds[best],
        less_may_do=low is None,
    )


def closed_in(tried: Tried, target: float, low: float, high: float) -> float:
    """The factor that reaches the target, within `_CLOSE` of one that does not.

    Looked for where the speeds at both ends put it, and in the middle where that has twice moved
    the same end.
    """
    moved: list[bool] = []
    while high / low > _CLOSE:
        middle = (low * high) ** 0.5
        slow, fast = tried.speeds[low], tried.speeds[high]
        if slow > 0 and moved[-2:] not in ([True, True], [False, False]):
            guess = low * (high / low) ** (log(target / slow) / log(fast / slow))
            middle = min(max(guess, low * _NEAR), high / _NEAR)
        moved.append(tried.reaches(middle))
        low, high = (low, middle) if moved[-1] else (middle, high)
    return high


def bracket(
    reaches: Callable[[float], bool], reached_now: bool
) -> tuple[float | None, float | None]:
    """(a factor that does not reach, one that does), doubled or halved; None: none was found."""
    factor = 1.0
    if reached_now:
        for _ in range(_MOST_HALVINGS):
            if not reaches(factor / 2):
                return factor / 2, factor
            factor /= 2
        return None, factor
    for _ in range(_MOST_DOUBLINGS):
        if reaches(factor * 2):
            return factor, factor * 2
        factor *= 2
    return factor, None
