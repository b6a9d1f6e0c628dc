"""More memory is never slower: the best plan of all caps of a lattice up to those given.

A plan within smaller caps is one within larger caps, too. So the answer is the fastest of the plans
at every point of a fixed lattice that is not above the given caps. Only those need a plan whose
lower bound is below the fastest found, and for which there is none yet: a plan stands for all
points between the caps that it was made for and the memory that it takes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from twinstream.planner.family import Family, Found
from twinstream.schedule.document import Caps
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.verify_layout import arena_bytes

_POINTS_PER_OCTAVE = 16
_LEAST_BYTES = 2**12

FamilyWithin = Callable[[Caps], Family]


def best_of_lattice(family_within: FamilyWithin, caps: Caps) -> Found | None:
    """The fastest plan of all lattice points within the caps; None if none has any.

    Args:
        family_within: the ways to cut the step, within caps.
        caps: those given; what comes back has them, and the bound within them.
    """
    best: Found | None = None
    device_enough: float = inf
    for device in lattice(caps.device_bytes):
        if device is not None and device >= device_enough:
            continue
        column = _Column(family_within, caps.model_copy(update={"device_bytes": device}), best)
        if column.hopeless:
            break
        best, device_enough = column.best, column.device_bytes
    if best is None:
        return None
    given = {"device_bytes": caps.device_bytes, "host_bytes": caps.host_bytes}
    schedule = best.schedule.model_copy(
        update={"caps": best.schedule.caps.model_copy(update=given)}
    )
    bound = family_within(caps).step_bound_of(schedule.workload)
    return replace(best, schedule=schedule, bound=bound)


class _Column:
    """The lattice points of one device cap.

    `hopeless`: not even all the host memory there is makes it faster than the best so far.
    `device_bytes`: what the plan with all the host memory takes of the device.
    """

    def __init__(self, family_within: FamilyWithin, caps: Caps, best: Found | None) -> None:
        self.best, self.hopeless, self.device_bytes = best, False, inf
        host_enough: float = inf
        for index, host in enumerate(lattice(caps.host_bytes)):
            if host is not None and host >= host_enough:
                continue
            family = family_within(caps.model_copy(update={"host_bytes": host}))
            if family.least_s() * 1e9 >= (inf if self.best is None else self.best.step_ns):
                self.hopeless = index == 0
                return
            found = family.search()
            if found is None:
                continue
            host_enough = arena_bytes(found.schedule, HOST)
            if index == 0:
                arena = arena_bytes(found.schedule, DEVICE)
                self.device_bytes = arena + found.schedule.caps.outside_arena_bytes
            if self.best is None or found.step_ns < self.best.step_ns:
                self.best = found


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
