"""Fluid sharing: ops in flight share resources by max-min fairness."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import simpy


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

    Water filling: every resource offers its flows equal shares of what is left. Flows that need
    no more than their shares run at full speed; when there is none, the flows held back most are
    fixed at the share of the resource that holds them, and the rest is shared anew.
    """
    full = [1.0 / flow.alone_ns for flow in flows]
    if _uncontended(flows, full, capacity):
        return full
    rates = [0.0] * len(flows)
    left = dict(capacity)
    active = list(range(len(flows)))
    while active:
        limits = _limits(flows, active, left)
        fixed = [i for i in active if limits[i][0] >= full[i]]
        if fixed:
            for i in fixed:
                rates[i] = full[i]
        else:
            worst = min(active, key=lambda i: (limits[i][0] / full[i], i))
            fixed = [i for i in active if limits[i][1] == limits[worst][1]]
            for i in fixed:
                rates[i] = limits[i][0]
        for i in fixed:
            active.remove(i)
            for resource, amount in flows[i].amounts:
                left[resource] = max(0.0, left[resource] - amount * rates[i])
    return rates


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


def _limits(
    flows: Sequence[Flow], active: Sequence[int], left: Mapping[str, float]
) -> dict[int, tuple[float, str]]:
    """Each flow's rate at its equal shares, and the resource that sets it."""
    sharers: dict[str, int] = {}
    for i in active:
        for resource, _ in flows[i].amounts:
            sharers[resource] = sharers.get(resource, 0) + 1
    return {
        i: min(
            ((left[r] / sharers[r] / amount, r) for r, amount in flows[i].amounts if amount),
            default=(math.inf, ""),
        )
        for i in active
    }


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
        self._rates = fair_rates(self._flows, self._capacity)
        self._generation += 1
        if not self._flows:
            return
        next_ns = min(left / rate for left, rate in zip(self._left, self._rates, strict=True))
        timer = self._env.timeout(max(0, math.ceil(next_ns - 1e-6)), self._generation)
        assert timer.callbacks is not None
        timer.callbacks.append(self._wake)

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
