"""More memory is never slower: the best plan of all caps of a lattice up to those given.

A plan within smaller caps is one within larger caps. So the answer is the fastest of the plans at
every point of a fixed lattice that is not above the given caps. Which plan a point has depends on
nothing but the point: it is the first that fits there of those searched with unlimited memory,
with as much host memory as one likes, with as much device memory, and with the point's own caps.
Where memory is plenty, one search stands for many points; a point whose lower bound is not below
the fastest plan so far needs none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from twinstream.planner.family import Family, Found
from twinstream.schedule.document import Caps
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.verify_layout import arena_bytes

_POINTS_PER_OCTAVE = 16
_LEAST_BYTES = 2**12
_MOST_BYTES = 2**50  # more than any memory: without a cap, points begin there

FamilyWithin = Callable[[Caps], Family]


def best_of_lattice(family_within: FamilyWithin, caps: Caps) -> Found | None:
    """The fastest plan of all lattice points within the caps; None if none has any.

    Args:
        family_within: the ways to cut the step, within caps.
        caps: those given; what comes back has them, and the bound within them.
    """
    plans, best = _Plans(family_within), None
    column_stands: float = inf
    for device in lattice(caps.device_bytes):
        if _at_least(device, column_stands):
            continue
        column = caps.model_copy(update={"device_bytes": device})
        best, column_stands, hopeless = _best_of_column(plans, column, best)
        if hopeless:
            break
    if best is None:
        return None
    given = {"device_bytes": caps.device_bytes, "host_bytes": caps.host_bytes}
    schedule = best.schedule.model_copy(
        update={"caps": best.schedule.caps.model_copy(update=given)}
    )
    bound = family_within(caps).step_bound_of(schedule.workload)
    return replace(best, schedule=schedule, bound=bound)


def _best_of_column(
    plans: "_Plans", column: Caps, best: Found | None
) -> tuple[Found | None, float, bool]:
    """The fastest plan so far, with those of one device cap.

    Returns:
        That plan; down to which device cap columns have the same plans; whether not even with all
        the host memory there is a point may be faster.
    """
    stands: float = inf
    column_stands: float = 0.0
    for number, host in enumerate(lattice(column.host_bytes)):
        if _at_least(host, stands):
            continue
        point = column.model_copy(update={"host_bytes": host})
        plan = plans.plan(point, search=False)
        if plan is None and not plans.may_beat(best, point):
            return best, column_stands if number else inf, number == 0
        plan = plan or plans.plan(point, search=True)
        assert plan is not None, "it was searched"
        column_stands = max(column_stands, plan.device_bytes if plan.unlimited else inf)
        if plan.found is None:
            continue
        stands = plan.host_bytes if plan.of_column else inf
        if best is None or plan.found.step_ns < best.step_ns:
            best = plan.found
    return best, column_stands, False


def _at_least(cap_bytes: int | None, other: float) -> bool:
    return other < inf and (cap_bytes is None or cap_bytes >= other)


@dataclass(frozen=True)
class _Plan:
    """What a search with some caps found, and the least caps within which that fits.

    `of_column`: the search had unlimited host memory; `unlimited`: of both memories.
    """

    found: Found | None
    of_column: bool
    unlimited: bool
    device_bytes: float = inf
    host_bytes: float = inf

    def fits(self, point: Caps) -> bool:
        return _at_least(point.device_bytes, self.device_bytes) and _at_least(
            point.host_bytes, self.host_bytes
        )


_NOTHING = _Plan(None, of_column=False, unlimited=False)


@dataclass
class _Plans:
    """The plans of points, each search made once."""

    family_within: FamilyWithin
    _searched: dict[Caps, _Plan] = field(default_factory=dict)
    _family: tuple[Caps, Family] | None = None

    def plan(self, point: Caps, *, search: bool) -> _Plan | None:
        """The point's plan, one that found nothing if it has none.

        Without leave to `search` None if not all searches that decide it have been made.
        """
        for caps in _searches(point):
            if caps not in self._searched:
                if not search:
                    return None
                self._searched[caps] = self._search(caps)
            if self._searched[caps].fits(point):
                return self._searched[caps]
        return _NOTHING

    def may_beat(self, best: Found | None, point: Caps) -> bool:
        """Whether the lower bound within the caps is below the step time of the best so far."""
        best_ns = inf if best is None else best.step_ns
        return self._within(point).least_s() * 1e9 < best_ns

    def _search(self, caps: Caps) -> _Plan:
        found, no_host_cap = self._within(caps).search(), caps.host_bytes is None
        kind = {"of_column": no_host_cap, "unlimited": no_host_cap and caps.device_bytes is None}
        if found is None:
            return _Plan(None, **kind)
        schedule = found.schedule
        device_bytes = arena_bytes(schedule, DEVICE) + schedule.caps.outside_arena_bytes
        return _Plan(
            found, **kind, device_bytes=device_bytes, host_bytes=arena_bytes(schedule, HOST)
        )

    def _within(self, caps: Caps) -> Family:
        if self._family is None or self._family[0] != caps:
            self._family = caps, self.family_within(caps)
        return self._family[1]


def _searches(point: Caps) -> Iterator[Caps]:
    """The caps to search with for a point, those with the most memory first."""
    for unlimited in (("device_bytes", "host_bytes"), ("host_bytes",), ("device_bytes",), ()):
        yield point.model_copy(update=dict.fromkeys(unlimited))


def lattice(cap_bytes: int | None) -> Iterator[int | None]:
    """The points up to a cap, the largest first: sixteen to every doubling.

    >>> list(lattice(2**12 + 2**9))
    [4608, 4352, 4096]
    """
    if cap_bytes is None:
        yield None
    point = _MOST_BYTES if cap_bytes is None else min(cap_bytes, _MOST_BYTES)
    while point >= _LEAST_BYTES:
        spacing = 2 ** (point.bit_length() - 1) // _POINTS_PER_OCTAVE
        yield point // spacing * spacing
        point = point // spacing * spacing - 1
