"""More memory is never slower: the best plan of all caps of a lattice up to those given.

A plan within smaller caps is one within larger caps. So the answer is the fastest of the plans at
every point of a fixed lattice that is not above the given caps. Which plan a point has depends on
nothing but the point: it is the fastest that fits there of those searched with unlimited memory,
with as much host memory as one likes, with as much device memory, and with the point's own caps.
A search without limit of a memory of which its plan leaves a fifth free at the point, or that finds
none, stands for the one within the limit. So where memory is plenty, one search stands for many
points; a point whose lower bound is not below the fastest plan so far needs none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from twinstream.planner.search.family import Family, Found
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST

_DEVICE_POINTS, _HOST_POINTS = 16, 8  # to every doubling
_PLENTY = 1.25  # of what a plan takes
_LEAST_BYTES = 2**12
_MOST_BYTES = 2**50  # more than any memory: without a cap, points begin there
_FAMILIES = 8  # kept with their bounds: those of a point and without limits, and a few more

FamilyWithin = Callable[[Caps], Family]


class Lattice:
    """The plans of all points, each search made once.

    Args:
        family_within: the ways to cut the step, within caps.
    """

    def __init__(self, family_within: FamilyWithin) -> None:
        self._within = lru_cache(_FAMILIES)(family_within)
        self._searched: dict[Caps, _Searched] = {}
        self._least_ns: dict[Caps, float] = {}

    def best(self, caps: Caps) -> Found | None:
        """The fastest plan of all points within the caps; None if none has any.

        Args:
            caps: those given; what comes back has them, and the bound within them.
        """
        best = self._fastest(caps)
        if best is None:
            return None
        given = {"device_bytes": caps.device_bytes, "host_bytes": caps.host_bytes}
        schedule = best.schedule.model_copy(
            update={"caps": best.schedule.caps.model_copy(update=given)}
        )
        bound = self._within(caps).step_bound_of(schedule.workload)
        return replace(best, schedule=schedule, bound=bound)

    def fits(self, caps: Caps) -> bool:
        """Whether any point within the caps has a plan."""
        return self._fastest(caps, any_will_do=True) is not None

    def _fastest(self, caps: Caps, *, any_will_do: bool = False) -> Found | None:
        best: Found | None = None
        column_stands: float = inf
        for device in lattice(caps.device_bytes, _DEVICE_POINTS):
            if _at_least(device, column_stands):
                continue
            column_stands, stands = 0.0, inf
            for number, host in enumerate(lattice(caps.host_bytes, _HOST_POINTS)):
                if _at_least(host, stands):
                    continue
                point = caps.model_copy(update={"device_bytes": device, "host_bytes": host})
                best_ns = inf if best is None else best.step_ns
                if self._bound_ns(point) >= best_ns:
                    if not number:
                        return best  # nor with less of the device
                    break
                of_point = self._of_point(point)
                column_stands = max(column_stands, of_point.stands_from_device)
                stands = of_point.stands_from_host
                if of_point.found is not None and of_point.found.step_ns < best_ns:
                    best = of_point.found
                    if any_will_do:
                        return best
        return best

    def _of_point(self, point: Caps) -> "_OfPoint":
        column = point.model_copy(update={"host_bytes": None})
        row = point.model_copy(update={"device_bytes": None})
        unlimited = self._search(row.model_copy(update={"host_bytes": None}))
        plenty = _at_least(point.device_bytes, unlimited.plenty_of_device)
        of_column = unlimited if plenty else self._search(column)
        searched, stands_from_device = [unlimited, of_column], unlimited.plenty_of_device
        if not _at_least(point.host_bytes, of_column.plenty_of_host):
            if plenty:
                searched.append(self._search(row))
                stands_from_device = max(stands_from_device, searched[-1].plenty_of_device)
            if not _at_least(point.device_bytes, stands_from_device):
                searched.append(self._search(point))
        fitting = [one.found for one in searched if one.found is not None and one.fits(point)]
        best = min(fitting, key=lambda found: found.step_ns, default=None)
        return _OfPoint(best, stands_from_device, of_column.plenty_of_host)

    def _search(self, caps: Caps) -> "_Searched":
        if caps not in self._searched:
            self._searched[caps] = _searched(self._within(caps).search())
        return self._searched[caps]

    def _bound_ns(self, point: Caps) -> float:
        if point not in self._least_ns:
            self._least_ns[point] = self._within(point).least_s() * 1e9
        return self._least_ns[point]


def lattice(cap_bytes: int | None, points: int) -> Iterator[int | None]:
    """The points up to a cap, the largest first: so many, a power of 2, to every doubling.

    >>> list(lattice(2**12 + 2**9, 16))
    [4608, 4352, 4096]
    """
    if cap_bytes is None:
        yield None
    point = _MOST_BYTES if cap_bytes is None else min(cap_bytes, _MOST_BYTES)
    while point >= _LEAST_BYTES:
        spacing = 2 ** (point.bit_length() - 1) // points
        yield point // spacing * spacing
        point = point // spacing * spacing - 1


@dataclass(frozen=True)
class _OfPoint:
    """The plan of a point; from which device or host cap on others have no other plans.

    That is others with this host, or this device cap.
    """

    found: Found | None
    stands_from_device: float
    stands_from_host: float


@dataclass(frozen=True)
class _Searched:
    """What a search found, and the least caps it fits; nothing stands for any caps."""

    found: Found | None
    device_bytes: int = 0
    host_bytes: int = 0

    def fits(self, point: Caps) -> bool:
        return _at_least(point.device_bytes, self.device_bytes) and _at_least(
            point.host_bytes, self.host_bytes
        )

    @property
    def plenty_of_device(self) -> float:
        return _PLENTY * self.device_bytes

    @property
    def plenty_of_host(self) -> float:
        return _PLENTY * self.host_bytes


def _searched(found: Found | None) -> _Searched:
    if found is None:
        return _Searched(None)
    schedule = found.schedule
    device_bytes = arena_bytes(schedule, DEVICE) + schedule.caps.outside_arena_bytes
    return _Searched(found, device_bytes, arena_bytes(schedule, HOST))


def _at_least(cap_bytes: int | None, other: float) -> bool:
    return other < inf and (cap_bytes is None or cap_bytes >= other)
