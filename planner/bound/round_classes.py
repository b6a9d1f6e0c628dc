"""Classes of rounds in the bound's linear program: the first round, the middle ones, and the last.

Middle rounds are alike, so that the program has one of them, weighted by their number.
"""

from dataclasses import dataclass

from twinstream.planner.bound.gaps import Gap
from twinstream.planner.bound.segments import Segments
from twinstream.schedule.chain import Chain

CLASSES = 3


@dataclass(frozen=True)
class RoundClasses:
    """The rounds of a chain by class; of three rounds the second may stand for many."""

    starts: tuple[int, ...]
    num_segments: int
    num_rounds: int

    @staticmethod
    def of(chain: Chain, segments: Segments, num_rounds: int | None) -> "RoundClasses":
        lowered = len(chain.round_starts)
        count = num_rounds or lowered
        assert count == lowered or (lowered == CLASSES and count > CLASSES)
        starts = tuple(segments.of_task[start] for start in chain.round_starts)
        return RoundClasses(starts, segments.count, count)

    @property
    def folded(self) -> bool:
        return self.num_rounds > len(self.starts)

    @property
    def num_middles(self) -> int:
        return self.num_rounds - 2

    def of_position(self, position: int) -> int:
        return max((i for i, start in enumerate(self.starts) if position >= start), default=0)

    def weight(self, class_: int) -> float:
        """Return the number of rounds that a class stands for."""
        return float(self.num_middles) if self.folded and class_ == 1 else 1.0

    def begins_class(self, position: int) -> bool:
        """Return whether the task before is of another class, with middle rounds folded."""
        return self.folded and position in self.starts[1:]

    def crosses(self, gap: Gap) -> bool:
        """Return whether a gap goes from one round into the next, with middle rounds folded."""
        if not self.folded or gap.end <= gap.begin:
            return False
        return self.of_position(gap.end) == self.of_position(gap.begin) + 1

    def weight_of_gap(self, gap: Gap) -> float:
        inside = gap.end > gap.begin and self.of_position(gap.begin) == self.of_position(gap.end)
        return self.weight(self.of_position(gap.begin)) if inside else 1.0
