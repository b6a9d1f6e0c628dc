"""What it costs the host to enqueue: ns by kind of op, measured around every one of them."""

from twinstream.schedule.timeline import HostCost


class CostMeter:
    """Sums over all passes but the first, which pays for what is done only once."""

    def __init__(self) -> None:
        self._ns: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._waited_ns = 0
        self._num_passes = 0

    def begin_steady(self) -> None:
        """Forget what the first pass cost."""
        self._ns, self._calls, self._waited_ns = {}, {}, 0

    def add(self, kind: str, spent_ns: int) -> None:
        """Count one call."""
        self._ns[kind] = self._ns.get(kind, 0) + spent_ns
        self._calls[kind] = self._calls.get(kind, 0) + 1

    def end_pass(self, waited_ns: int) -> None:
        """`waited_ns`: how long the dispatching thread was blocked in this pass."""
        self._waited_ns += waited_ns
        self._num_passes += 1

    def result(self, num_ops: int) -> HostCost | None:
        """Means over the steady passes; None when nothing but a first pass was run."""
        steady = self._num_passes - 1
        if steady < 1:
            return None
        return HostCost(
            num_passes=steady,
            ns_per_op=sum(self._ns.values()) / steady / num_ops,
            ns_per_call={kind: self._ns[kind] / self._calls[kind] for kind in self._ns},
            calls_per_pass={kind: self._calls[kind] / steady for kind in self._ns},
            waited_ns_per_pass=self._waited_ns / steady,
        )
