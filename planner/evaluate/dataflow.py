"""The flow of content between ops through slots: which op wrote what another op reads."""

from collections.abc import Iterable

from twinstream.schedule.derived.makers import with_makers
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.proof.accesses import AccessMap


class Dataflow:
    """The flow of content among the first ops of a safe schedule, in issue order.

    What an op reads was made by the last op that wrote exactly those bytes: had another cut them
    since, the schedule would not be safe. What nobody wrote is there when a pass begins.
    """

    def __init__(self, schedule: RankSchedule, num_ops: int) -> None:
        self.num_ops = num_ops
        accesses = AccessMap(schedule.tensors, schedule.slots)
        written: dict[tuple[int, int, int], int] = {}
        self._sources: list[set[int]] = []
        for position, op in enumerate(schedule.ops[:num_ops]):
            found = accesses.of(op)
            places = [(a.tier, a.start, a.end) for a in found if a.mode in ("read", "update")]
            self._sources.append({written[place] for place in places if place in written})
            for access in found:
                if access.mode != "read":
                    written[access.tier, access.start, access.end] = position

    def needed_by(self, positions: Iterable[int]) -> set[int]:
        """Return these ops and all that make what they read, directly or not."""
        return with_makers(positions, self._sources)
