"""What it costs the host to enqueue: ns by kind of op, measured around every one of them."""

from collections import Counter

from twinstream.schedule.timeline import HostCost


class CostMeter:
    """Sums over all passes but the first, which pays for what is done only once.

    Passes whose ops are timed are kept apart: recording when ops start and end costs the host,
    and they are never replayed as graphs.
    """

    def __init__(self) -> None:
        self._pass = _Sums()
        self._plain, self._timed = _Sums(), _Sums()
        self._is_first = True

    def add(self, kind: str, spent_ns: int) -> None:
        """Count one call."""
        self._pass.ns[kind] += spent_ns
        self._pass.calls[kind] += 1

    def end_pass(self, waited_ns: int, *, timed: bool) -> None:
        """`waited_ns`: how long the dispatching thread was blocked in this pass."""
        if not self._is_first:
            kept = self._timed if timed else self._plain
            kept.ns.update(self._pass.ns)
            kept.calls.update(self._pass.calls)
            kept.waited_ns += waited_ns
            kept.num_passes += 1
        self._is_first = False
        self._pass = _Sums()

    def result(self, num_ops: int) -> HostCost | None:
        """Means over the steady passes that are not timed op by op, or over all where all are.

        None when nothing but a first pass was run.
        """
        sums = self._plain if self._plain.num_passes else self._timed
        steady = sums.num_passes
        if not steady:
            return None
        return HostCost(
            num_passes=steady,
            ns_per_op=sums.ns.total() / steady / num_ops,
            ns_per_call={kind: sums.ns[kind] / sums.calls[kind] for kind in sums.ns},
            calls_per_pass={kind: sums.calls[kind] / steady for kind in sums.ns},
            waited_ns_per_pass=sums.waited_ns / steady,
            ops_timed=sums is self._timed,
        )


class _Sums:
    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.waited_ns = 0
        self.num_passes = 0
