"""The host's cost of enqueueing: ns by kind of op, measured around every one of them."""

from collections import Counter
from dataclasses import dataclass, field

from twinstream.schedule.timeline import HostCost


class CostMeter:
    """Counts passes apart whose ops are timed: recording when ops start and end costs the host,
    and they are never replayed as graphs.
    """

    def __init__(self) -> None:
        self._open = _Pass()
        self._passes: list[_Pass] = []

    def add(self, kind: str, spent_ns: int) -> None:
        """Count one call."""
        self._open.ns[kind] += spent_ns
        self._open.calls[kind] += 1

    def end_pass(self, waited_ns: int, *, timed: bool) -> None:
        """`waited_ns`: how long the dispatching thread was blocked in this pass."""
        self._open.waited_ns, self._open.timed = waited_ns, timed
        self._passes.append(self._open)
        self._open = _Pass()

    def result(self, num_ops: int) -> HostCost | None:
        """Means over the passes that are not timed op by op, or over all where all are.

        The first does not count, which pays for what is done only once. None without another.
        """
        steady = self._passes[1:]
        counted = [found for found in steady if not found.timed] or steady
        if not counted:
            return None
        ns = sum((found.ns for found in counted), Counter[str]())
        calls = sum((found.calls for found in counted), Counter[str]())
        return HostCost(
            num_passes=len(counted),
            ns_per_op=ns.total() / len(counted) / num_ops,
            ns_per_call={kind: ns[kind] / calls[kind] for kind in calls},
            calls_per_pass={kind: calls[kind] / len(counted) for kind in calls},
            waited_ns_per_pass=sum(found.waited_ns for found in counted) / len(counted),
            ops_timed=counted[0].timed,
        )


@dataclass
class _Pass:
    ns: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    waited_ns: int = 0
    timed: bool = False
