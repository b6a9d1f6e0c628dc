"""Costs without a machine, for what is reckoned by hand and for both worlds side by side."""

from collections.abc import Callable, Mapping

from twinstream.schedule.ops import Op
from twinstream.simulator.costs import OpCost


class FixedCosts:
    """Every op takes a given time and shares nothing."""

    def __init__(self, duration_ns: Callable[[Op], int], wait_ns: int = 0) -> None:
        self.wait_ns = wait_ns
        self.capacity: Mapping[str, float] = {}
        self._duration_ns = duration_ns

    def cost(self, op: Op) -> OpCost:
        return OpCost(self._duration_ns(op), None)
