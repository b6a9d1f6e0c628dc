"""Fluid sharing: ops in flight share resources by max-min fairness."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_SLACK = 1 + 1e-12
_MAX_SWEEPS = 1000  # random flows over six resources took at most 83, those of machines take 3


@dataclass(frozen=True, slots=True)
class Flow:
    """An op's demand: `alone_ns` when nothing else runs, and the amounts it uses on the way.

    Amounts are in the resource's own unit (bytes, or ns of a whole machine's compute) over the
    whole of the op; a resource's capacity is in that unit per ns.
    """

    alone_ns: float
    amounts: tuple[tuple[str, float], ...]


def fair_rates(flows: Sequence[Flow], capacity: Mapping[str, float]) -> list[float]:
    """Progress per ns of each flow: at most 1 / alone_ns, max-min fair on shared resources.

    A flow below full speed is held by a resource without anything left, of which no other flow
    draws more. What a flow does not draw because it is held elsewhere goes to the others. Levels
    (the most that a flow may draw of a resource) are found by filling one resource after the
    other, given the levels of the rest, until none changes.
    """
    full = [1.0 / flow.alone_ns for flow in flows]
    if _uncontended(flows, full, capacity):
        return full
    amounts = [{name: amount for name, amount in flow.amounts if amount} for flow in flows]
    resources = [name for name in capacity if any(name in used for used in amounts)]
    levels = dict.fromkeys(resources, math.inf)
    rates = full
    for _ in range(_MAX_SWEEPS):
        for name in resources:
            levels[name] = math.inf
            drawn = [
                used[name] * _rate(speed, used, levels)
                for speed, used in zip(full, amounts, strict=True)
                if name in used
            ]
            levels[name] = _level(drawn, capacity[name])
        before = rates
        rates = [_rate(speed, used, levels) for speed, used in zip(full, amounts, strict=True)]
        if all(abs(new - old) <= 1e-12 * old for new, old in zip(rates, before, strict=True)):
            break
    return rates


def _rate(full: float, amounts: Mapping[str, float], levels: Mapping[str, float]) -> float:
    return min(full, min((levels[name] / used for name, used in amounts.items()), default=full))


def _level(wanted: Sequence[float], capacity: float) -> float:
    """What each flow may draw so that all together draw the capacity; inf if they want less."""
    if sum(wanted) <= capacity:
        return math.inf
    left = capacity
    share = capacity / len(wanted)
    for number, amount in enumerate(sorted(wanted)):
        share = left / (len(wanted) - number)
        if amount >= share:
            break
        left -= amount
    return share


def _uncontended(
    flows: Sequence[Flow], full: Sequence[float], capacity: Mapping[str, float]
) -> bool:
    if len(flows) == 1:
        return True
    used: dict[str, float] = {}
    for flow, rate in zip(flows, full, strict=True):
        for resource, amount in flow.amounts:
            used[resource] = used.get(resource, 0.0) + amount * rate
    return all(total <= capacity[resource] for resource, total in used.items())


class SharedFlow:
    """A flow whose resources are numbered: `wants` is what it draws of each at full speed."""

    __slots__ = ("alone_ns", "flow", "full", "wants")

    def __init__(self, alone_ns: float, amounts: Mapping[int, float]) -> None:
        self.alone_ns = alone_ns
        self.full = 1.0 / alone_ns
        self.wants = {number: amount * self.full for number, amount in amounts.items() if amount}
        named = tuple((str(number), amount) for number, amount in amounts.items() if amount)
        self.flow = Flow(alone_ns, named)


@dataclass(slots=True, eq=False)
class RunningFlow:
    flow: SharedFlow
    done: Callable[[], None]
    rate: float
    left: float
    since_ns: int
    turn: int = 0


KnownRates = dict[tuple[int, ...], tuple[list[SharedFlow], list[float]]]


class Clock(Protocol):
    """What a pool needs of a SimPy environment."""

    @property
    def now(self) -> Any: ...

    def timeout(self, delay: Any, value: Any = None) -> Any: ...


class FluidPool:
    """Runs flows in a SimPy environment; those that meet on a crowded resource are max-min fair.

    A flow on resources that are not crowded runs at full speed and changes nobody's. Where one is,
    the flows that are joined by crowded resources share anew (`flows.fair_rates`). Ends are
    rounded up to whole ns.
    """

    def __init__(
        self, env: Clock, capacity: Sequence[float], known: KnownRates | None = None
    ) -> None:
        self._env = env
        self._capacity = capacity
        self._named = {str(number): most for number, most in enumerate(capacity)}
        self._on: list[list[RunningFlow]] = [[] for _ in capacity]
        self._known: KnownRates = {} if known is None else known

    def resume(self, running: RunningFlow) -> None:
        """Go on with a flow as it was left."""
        for number in running.flow.wants:
            self._on[number].append(running)
        self._time(running)

    def run(self, flow: SharedFlow, done: Callable[[], None]) -> RunningFlow:
        """Start a flow; `done` is called when it is through."""
        running = RunningFlow(flow, done, flow.full, 1.0, int(self._env.now))
        crowded = False
        for number in flow.wants:
            self._on[number].append(running)
            crowded = self._crowded(number) or crowded
        if crowded:
            running.rate = 0.0
            self._share(flow.wants)
        else:
            self._time(running)
        return running

    def _crowded(self, number: int) -> bool:
        users = self._on[number]
        if len(users) == 1:
            return False
        wanted = sum([user.flow.wants[number] for user in users])
        return wanted > self._capacity[number] * _SLACK

    def _time(self, running: RunningFlow) -> None:
        running.turn += 1
        left_ns = max(0, math.ceil(running.left / running.rate - 1e-6))
        end_ns = running.since_ns + left_ns
        timer = self._env.timeout(end_ns - int(self._env.now), (running, running.turn))
        assert timer.callbacks is not None
        timer.callbacks.append(self._wake)

    def _wake(self, timer: Any) -> None:
        told: tuple[RunningFlow, int] = timer.value
        running, turn = told
        if turn != running.turn:
            return
        wants = running.flow.wants
        crowded = [number for number in wants if self._crowded(number)]
        for number in wants:
            self._on[number].remove(running)
        if crowded:
            self._share(crowded)
        running.done()

    def _share(self, numbers: Mapping[int, float] | Sequence[int]) -> None:
        """New rates for all flows that crowded resources join to these resources."""
        joined, seen, open_ = [], set(), list(numbers)
        looked = set(open_)
        while open_:
            for user in self._on[open_.pop()]:
                if id(user) in seen:
                    continue
                seen.add(id(user))
                joined.append(user)
                for number in user.flow.wants:
                    if number not in looked and self._crowded(number):
                        looked.add(number)
                        open_.append(number)
        now_ns = int(self._env.now)
        for user, rate in zip(joined, self._rates(joined), strict=True):
            if rate == user.rate:
                continue
            user.left -= user.rate * (now_ns - user.since_ns)
            user.since_ns, user.rate = now_ns, rate
            self._time(user)

    def _rates(self, users: list[RunningFlow]) -> list[float]:
        key = tuple([id(user.flow) for user in users])
        known = self._known.get(key)
        if known is None:
            flows = [user.flow for user in users]  # kept, so that their ids stay theirs
            rates = fair_rates([flow.flow for flow in flows], self._named)
            known = self._known[key] = (flows, rates)
        return known[1]
