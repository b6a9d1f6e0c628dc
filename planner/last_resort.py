"""What the program finds at all, where nothing else fits."""

from dataclasses import dataclass

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.choices import Choices
from twinstream.planner.congestion import full_shares
from twinstream.planner.deciding import Candidate, Decider, DoesNotFit
from twinstream.planner.emission import Placement, emitted, host_bytes
from twinstream.planner.library_memory import with_library_memory
from twinstream.planner.policies.resident import resides
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.tensors import HOST
from twinstream.schedule.verify_layout import arena_bytes


@dataclass(frozen=True)
class _Found:
    decider: Decider
    candidate: Candidate
    placement: Placement


class LastResort:
    """Plans with no memory left for copies in flight, within any caps.

    Content moves to the host by whole units, the program moves shares of them. So where it finds no
    plan within a host cap, one that it finds with any amount of host memory may still fit.

    Args:
        chain: the step, or a few rounds of it.
        machine: for which it is planned.
        choices: what is fixed.
        num_rounds: of the whole step.
    """

    def __init__(self, chain: Chain, machine: Machine, choices: Choices, num_rounds: int) -> None:
        self._chain, self._machine, self._choices = chain, machine, choices
        self._num_rounds = num_rounds
        self._with_any_host: dict[Caps, _Found | None] = {}

    def fits(self, caps: Caps) -> bool:
        """Whether there is a plan."""
        if self._choices.open and resides(self._chain, self._machine, caps):
            return True
        return self._found(caps) is not None or self.takes_no_more(caps)

    def host_bytes(self, caps: Caps) -> int | None:
        """What a plan takes of the host with this device cap and any amount of host memory."""
        found = self._found_with_any_host(caps)
        return None if found is None else host_bytes(found.placement)

    def takes_no_more(self, caps: Caps) -> bool:
        """Whether a few rounds that were planned with any amount of host memory fit the caps."""
        return self._lifted(caps) is not None

    def schedule(self, chain: Chain, caps: Caps) -> Schedule | None:
        """A schedule of the whole step, found with any amount of host memory, if it fits."""
        if (found := self._lifted(caps)) is None:
            return None
        caps = with_library_memory(caps, chain)
        judged = emitted(found.placement, self._machine, caps, "optimal")
        try:
            schedule = found.decider.schedule(found.candidate, judged, chain)
        except DoesNotFit:
            return None
        if arena_bytes(schedule, HOST) > (caps.host_bytes or 0):
            return None
        return schedule.model_copy(update={"caps": caps})

    def _lifted(self, caps: Caps) -> _Found | None:
        if caps.host_bytes is None:
            return None
        found = self._found_with_any_host(caps)
        fits = found is not None and host_bytes(found.placement) <= caps.host_bytes
        return found if fits else None

    def _found_with_any_host(self, caps: Caps) -> _Found | None:
        caps = caps.model_copy(update={"host_bytes": None})
        if caps not in self._with_any_host:
            self._with_any_host[caps] = self._found(caps)
        return self._with_any_host[caps]

    def _found(self, caps: Caps) -> _Found | None:
        decider = Decider(self._chain, self._machine, caps, self._num_rounds)
        found = decider.fitting(self._choices, 0, full_shares(len(decider.small.tasks)))
        return None if found is None else _Found(decider, *found)
