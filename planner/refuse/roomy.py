"""Plans of long chains that leave a share of both memories free: they are packed at once.

To pack thousands of tasks into the last bytes of a memory takes minutes. Where a few hundredths of
it may stay free a plan is found in seconds, and so are caps that would do.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from math import ceil

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.kept_programs import rough_guide
from twinstream.planner.choices import Choices
from twinstream.planner.decide.decider import Candidate, Decider
from twinstream.planner.decide.host_room import HostIsFull
from twinstream.planner.emit.emission import Placement
from twinstream.planner.library_memory import with_library_memory
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps

LONG = 200  # tasks of the judged rounds; of shorter chains caps are found to a few bytes
VERY_LONG = 1500

_SHARES = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.25, 0.4)
_SHARES_OF_VERY_LONG = (0.02, 0.04, 0.08, 0.16, 0.3)
_STEP = 1 + 1 / 256
_MOST_STEPS = 4300  # to 20 million times a cap

_PAGE = 2**12
_MIB = 2**20
_LARGE = 2**26

_Made = tuple[Decider, Candidate, Placement]


class RoomyPlans:
    """The arguments are those of `LastResort`."""

    def __init__(self, chain: Chain, machine: Machine, choices: Choices, num_rounds: int) -> None:
        self._chain, self._machine, self._choices = chain, machine, choices
        self._num_rounds = num_rounds
        very_long = len(chain.tasks) > VERY_LONG
        self._shares = _SHARES_OF_VERY_LONG if very_long else _SHARES
        self._made: dict[tuple[Caps, float], _Made | None] = {}

    def found(self, caps: Caps) -> Iterator[_Made]:
        """Plans of the judged rounds within the caps, those that leave the least free first."""
        shares = takewhile(partial(self._may_do, caps), self._shares)
        plans = (self._leaving(caps, share) for share in shares)
        return (plan for plan in plans if plan is not None)

    def smallest(self, caps: Caps, field: str, would_do: int | None) -> int | None:
        """A cap that would do, the other as given: what the program needs, and a share more.

        Args:
            caps: that do not.
            field: of the caps, the one to raise.
            would_do: a cap that is known to; None if none is.
        """
        if (given := getattr(caps, field)) is None:
            return None
        sizes = _sizes_above(given)
        within, first = [caps.model_copy(update={field: size}) for size in sizes], 0
        for share in self._shares:
            first = _first(within, first, partial(self._may_do, share=share))
            if first == len(sizes) or (would_do is not None and sizes[first] >= would_do):
                break
            if self._leaving(within[first], share) is not None:
                return sizes[first]
        return would_do

    def _leaving(self, caps: Caps, share: float) -> _Made | None:
        if (caps, share) not in self._made:
            decider = Decider(self._chain, self._machine, caps, self._num_rounds)
            try:
                plan = decider.decided_within(self._choices, _less(decider.caps, share))
            except HostIsFull:
                plan = None
            self._made[caps, share] = None if plan is None else (decider, *plan)
        return self._made[caps, share]

    def _may_do(self, caps: Caps, share: float) -> bool:
        """Whether a share less than the caps is enough for the program."""
        program = rough_guide(
            with_rounds(self._chain, PROGRAM_ROUNDS), self._machine, num_rounds=self._num_rounds,
            choices=self._choices,
        )  # fmt: skip
        return program.bound(_less(with_library_memory(caps, self._chain), share)) is not None


def _sizes_above(given_bytes: int) -> list[int]:
    """Each 1/256 larger, in whole MiB, as they are told; small ones in pages."""
    given_bytes = max(given_bytes, _PAGE)
    sizes = (ceil(given_bytes * _STEP**n) for n in range(1, _MOST_STEPS + 1))
    units = ((size, _MIB if size >= _LARGE else _PAGE) for size in sizes)
    return sorted({-(-size // unit) * unit for size, unit in units})


def _first(caps: Sequence[Caps], begin: int, enough: Callable[[Caps], bool]) -> int:
    """Where the first are that are enough, as all behind are: soon found not far from where to
    begin; behind the last if none are.
    """
    end = len(caps)
    if begin == end or not enough(caps[-1]):
        return end
    low, ahead = begin, 1
    while low + ahead < end and not enough(caps[low + ahead - 1]):
        low, ahead = low + ahead, 2 * ahead
    return bisect_left(caps, True, low, min(low + ahead, end), key=enough)


def _less(caps: Caps, share: float) -> Caps:
    """Caps whose arenas are smaller by a share."""
    sizes = caps.arena_bytes("device"), caps.arena_bytes("host")
    return caps.with_arenas(*(size and round((1.0 - share) * size) for size in sizes))
