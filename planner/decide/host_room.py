"""How much of the host the program gets, so that plans of whole units just fit it."""

from dataclasses import dataclass

from twinstream.planner.bound.gap_columns import GIB
from twinstream.planner.bound.lower_bound import LowerBound
from twinstream.planner.emit.emission import Placement, host_bytes
from twinstream.schedule.document import Caps
from twinstream.schedule.errors import TwinstreamError

_AT_FIRST = 0.99
_LESS = 0.002
_WORTH = 0.002


class HostIsFull(TwinstreamError):
    """A placement takes so many bytes of the host more than there are."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(f"{missing_bytes:,} bytes of host memory are missing")
        self.missing_bytes = missing_bytes


def require_room(placement: Placement, caps: Caps) -> None:
    """Refuse what does not fit the host.

    Raises:
        HostIsFull: with what is missing.
    """
    cap_bytes = caps.arena_bytes("host")
    if cap_bytes is not None and (missing := host_bytes(placement) - cap_bytes) > 0:
        raise HostIsFull(missing)


@dataclass
class HostRoom:
    """The host's arena, and what of it the program got for the last plan that fitted.

    The program moves shares of units, a plan whole ones: it takes a little more or less.

    Args:
        cap_bytes: the arena's; None without a cap, and then there is always room.
        program_bytes: what the program gets.
    """

    cap_bytes: int | None
    program_bytes: int | None

    @staticmethod
    def of(cap_bytes: int | None) -> "HostRoom":
        """Where nothing was planned yet, a hundredth is left for rounding."""
        return HostRoom(cap_bytes, None if cap_bytes is None else round(cap_bytes * _AT_FIRST))

    def less(self, program_bytes: int | None, missing_bytes: int, tried: int) -> int | None:
        """What the program gets after a plan that did not fit: less by what was missing, and more.

        How units are rounded changes with it, or hardly, so that the same may be missing again:
        the more of the cap is taken away the more often that was `tried`.
        """
        if program_bytes is None or self.cap_bytes is None:
            return None
        more_bytes = round(_LESS * self.cap_bytes) << 2 * tried
        return program_bytes - missing_bytes * 5 // 4 - more_bytes

    def more(
        self, program_bytes: int | None, placement: Placement, solved: LowerBound
    ) -> int | None:
        """What it gets after a plan that left room; None where that room is worth little."""
        if program_bytes is None or self.cap_bytes is None:
            return None
        left = self.cap_bytes - host_bytes(placement)
        if left / GIB * solved.host_s_per_gib < _WORTH * solved.step_s:
            return None
        return program_bytes + left * 3 // 4
