"""More memory is never slower: the best plan of all caps of a lattice up to those given.

A plan within smaller caps is one within larger caps, too. So the answer is the fastest of the plans
at every point of a fixed lattice that is not above the given caps. Which plan a point has depends
on nothing but the point: it is the first that fits there of those searched with unlimited memory,
with as much host memory as one likes, with as much device memory, and with the point's own caps.
Where memory is plenty, one search stands for many points; a point whose lower bound is not below
the fastest plan so far needs none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from twinstream.planner.family import Family, Found
from twinstream.planner.fitting import schedule_fits
from twinstream.schedule.document import Caps

_POINTS_PER_OCTAVE = 16
_LEAST_BYTES = 2**12

FamilyWithin = Callable[[Caps], Family]


def best_of_lattice(family_within: FamilyWithin, caps: Caps) -> Found | None:
    """The fastest plan of all lattice points within the caps; None if none has any.

    Args:
        family_within: the ways to cut the step, within caps.
        caps: those given; what comes back has them, and the bound within them.
    """
    plans, best = _Plans(family_within), None
    for device in lattice(caps.device_bytes):
        more = False
        for host in lattice(caps.host_bytes):
            within = caps.model_copy(update={"device_bytes": device, "host_bytes": host})
            found = plans.known(within)
            if found is None:
                if not plans.may_beat(best, within):
                    break
                found = plans.searched(within)
            more = True
            if found is not None and (best is None or found.step_ns < best.step_ns):
                best = found
        if not more:  # not even with all the host memory there is
            break
    if best is None:
        return None
    given = {"device_bytes": caps.device_bytes, "host_bytes": caps.host_bytes}
    schedule = best.schedule.model_copy(
        update={"caps": best.schedule.caps.model_copy(update=given)}
    )
    bound = family_within(caps).step_bound_of(schedule.workload)
    return replace(best, schedule=schedule, bound=bound)


@dataclass
class _Plans:
    """The plans of points, each search made once."""

    family_within: FamilyWithin
    _found: dict[Caps, Found | None] = field(default_factory=dict)

    def known(self, point: Caps) -> Found | None:
        """The point's plan, if the searches that decide it have been made."""
        for caps in _searches(point):
            if caps not in self._found:
                return None
            if (found := self._fitting(caps, point)) is not None:
                return found
        return None

    def searched(self, point: Caps) -> Found | None:
        """The point's plan; None if it has none."""
        for caps in _searches(point):
            if caps not in self._found:
                self._found[caps] = self.family_within(caps).search()
            if (found := self._fitting(caps, point)) is not None:
                return found
        return None

    def may_beat(self, best: Found | None, point: Caps) -> bool:
        """Whether the lower bound within the caps is below the step time of the best so far."""
        best_ns = inf if best is None else best.step_ns
        return self.family_within(point).least_s() * 1e9 < best_ns

    def _fitting(self, caps: Caps, point: Caps) -> Found | None:
        found = self._found[caps]
        return found if found is not None and schedule_fits(found.schedule, point) else None


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
        return
    point = cap_bytes
    while point >= _LEAST_BYTES:
        spacing = 2 ** (point.bit_length() - 1) // _POINTS_PER_OCTAVE
        yield point // spacing * spacing
        point = point // spacing * spacing - 1
