"""Fluid sharing: ops in flight share resources by max-min fairness."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import simpy

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


class FluidPool:
    """Runs flows over shared resources in a SimPy environment; rates change as flows come and go.

    Ends are rounded up to whole ns. `used` adds up the amounts drawn from each resource.
    """

    def __init__(self, env: simpy.Environment, capacity: Mapping[str, float]) -> None:
        self._env = env
        self._capacity = capacity
        self._flows: list[Flow] = []
        self._left: list[float] = []
        self._rates: list[float] = []
        self._done: list[simpy.Event] = []
        self._since_ns = 0
        self._generation = 0
        self._known_rates: dict[tuple[int, ...], tuple[list[Flow], list[float]]] = {}

    def run(self, flow: Flow) -> simpy.Event:
        """Start a flow; the event fires when it is through."""
        self._advance()
        event = self._env.event()
        self._flows.append(flow)
        self._left.append(1.0)
        self._done.append(event)
        self._share()
        return event

    def _advance(self) -> None:
        now_ns = int(self._env.now)
        if elapsed := now_ns - self._since_ns:
            for i, rate in enumerate(self._rates):
                self._left[i] -= rate * elapsed
        self._since_ns = now_ns

    def _share(self) -> None:
        self._generation += 1
        if not self._flows:
            self._rates = []
            return
        self._rates = self._rates_now()
        next_ns = min(left / rate for left, rate in zip(self._left, self._rates, strict=True))
        timer = self._env.timeout(max(0, math.ceil(next_ns - 1e-6)), self._generation)
        assert timer.callbacks is not None
        timer.callbacks.append(self._wake)

    def _rates_now(self) -> list[float]:
        """Fair rates of the flows in flight; the same few sets of flows come again and again."""
        key = tuple(map(id, self._flows))
        known = self._known_rates.get(key)
        if known is None:
            flows = list(self._flows)  # kept, so that their ids stay theirs
            known = self._known_rates[key] = (flows, fair_rates(flows, self._capacity))
        return known[1].copy()

    def _wake(self, timer: simpy.Event) -> None:
        if timer.value != self._generation:
            return
        self._advance()
        # What is left after rounding is under a millionth of a ns's progress.
        through = [
            i
            for i, (left, rate) in enumerate(zip(self._left, self._rates, strict=True))
            if left <= rate * 1e-6
        ]
        for i in reversed(through):
            self._done.pop(i).succeed()
            del self._flows[i], self._left[i], self._rates[i]
        self._share()
