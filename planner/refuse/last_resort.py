"""What the program finds at all, where nothing else fits."""

from collections.abc import Callable, Iterator
from functools import cached_property

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.choices import Choices
from twinstream.planner.decide.decider import Candidate, Decider, DoesNotFit
from twinstream.planner.emit.emission import Placement, emitted, host_bytes
from twinstream.planner.library_memory import with_library_memory
from twinstream.planner.refuse.roomy import LONG, VERY_LONG, RoomyPlans
from twinstream.planner.rules.resident import resides
from twinstream.planner.search.congestion import full_shares
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import HOST

_OVER_LEAST = (1.003, 1.01, 1.03)
_BITS_OF_STEP = 8  # device caps are taken down to so many leading bits: few plans serve all caps


class LastResort:
    """Plans with no memory left for copies in flight, or of long chains with some left free.

    Content moves to the host by whole units, the program moves shares of them. So where it finds no
    plan within a host cap, one may still fit that it finds for the least host memory, and that may
    take more than that.

    Args:
        chain: the step, or a few rounds of it.
        machine: for which it is planned.
        choices: what is fixed.
        num_rounds: of the whole step.
    """

    def __init__(self, chain: Chain, machine: Machine, choices: Choices, num_rounds: int) -> None:
        self._chain, self._machine, self._choices = chain, machine, choices
        self._num_rounds = num_rounds
        self._on_little_host: dict[Caps, _OnLittleHost] = {}
        length = len(chain.tasks)
        self.roomy = RoomyPlans(chain, machine, choices, num_rounds) if length > LONG else None
        self.packs_tight = length <= VERY_LONG

    def fits(self, caps: Caps) -> bool:
        """Whether the program finds a plan within the caps, or everything fits the device."""
        if self._choices.open and resides(self._chain, self._machine, caps):
            return True
        decider = Decider(self._chain, self._machine, caps, self._num_rounds)
        shares = full_shares(len(decider.small.tasks))
        return decider.fitting(self._choices, 0, shares, fast=False) is not None

    def host_bytes(self, caps: Caps) -> int | None:
        """What a plan with little on the host takes of it, with this device cap."""
        return self._on_little(caps).host_bytes if self.packs_tight else None

    def takes_no_more(self, caps: Caps) -> bool:
        """Whether a few rounds that were planned with little on the host fit the caps."""
        if caps.host_bytes is None or not self.packs_tight:
            return False
        planned = self._on_little(caps)
        if planned.least_bytes is None or planned.least_bytes > caps.host_bytes:
            return False
        return planned.host_bytes is not None and planned.host_bytes <= caps.host_bytes

    def schedule(self, make: Callable[[], Chain], caps: Caps) -> Schedule | None:
        """A schedule of the whole step with room to spare or little on the host, if one fits.

        Args:
            make: the step.
            caps: of both memories.
        """
        plans = (self._schedule(*plan, make(), caps) for plan in self._plans(caps))
        return next(filter(None, plans), None)

    def _plans(self, caps: Caps) -> Iterator[tuple[Decider, Candidate, Placement]]:
        """Plans of the few rounds that fit the caps."""
        if self.roomy is not None:
            yield from self.roomy.found(caps)
        if self.takes_no_more(caps):
            planned = self._on_little(caps)
            assert planned.found is not None, "it takes no more"
            yield planned.decider, *planned.found

    def _schedule(
        self,
        decider: Decider,
        candidate: Candidate,
        placement: Placement,
        chain: Chain,
        caps: Caps,
    ) -> Schedule | None:
        caps = with_library_memory(caps, chain)
        judged = emitted(placement, self._machine, caps, "optimal")
        try:
            schedule = decider.schedule(candidate, judged, chain)
        except DoesNotFit:
            return None
        if caps.host_bytes is not None and arena_bytes(schedule, HOST) > caps.host_bytes:
            return None
        return schedule.model_copy(update={"caps": caps})

    def _on_little(self, caps: Caps) -> "_OnLittleHost":
        device_bytes = None if caps.device_bytes is None else _stepped(caps.device_bytes)
        caps = caps.model_copy(update={"device_bytes": device_bytes, "host_bytes": None})
        if caps not in self._on_little_host:
            decider = Decider(self._chain, self._machine, caps, self._num_rounds)
            self._on_little_host[caps] = _OnLittleHost(decider, self._choices)
        return self._on_little_host[caps]


class _OnLittleHost:
    """A plan that takes little more of the host than the program can, with one device cap."""

    def __init__(self, decider: Decider, choices: Choices) -> None:
        self.decider, self._choices = decider, choices

    @cached_property
    def least_bytes(self) -> float | None:
        """No plan of the program takes less of the host; None if none fits the device."""
        return self.decider.guide(self._choices).least_home_bytes(self.decider.caps)

    @cached_property
    def found(self) -> tuple[Candidate, Placement] | None:
        """That of several which takes the least of the host: how units are rounded differs."""
        if self.least_bytes is None:
            return None
        room = [round(over * self.least_bytes) for over in _OVER_LEAST]
        caps = self.decider.caps
        less = [caps.model_copy(update={"host_bytes": size}) for size in room]
        found = [self.decider.decided_within(self._choices, caps) for caps in less]
        return min(filter(None, found), key=lambda one: host_bytes(one[1]), default=None)

    @cached_property
    def host_bytes(self) -> int | None:
        return None if self.found is None else host_bytes(self.found[1])


def _stepped(size_bytes: int) -> int:
    """The size, or less by under a hundredth: the same for all sizes of a step."""
    shift = max(0, size_bytes.bit_length() - _BITS_OF_STEP)
    return size_bytes >> shift << shift
