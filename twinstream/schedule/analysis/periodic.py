"""Step time from the ends of consecutive passes: the periodic rule of both worlds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

MAX_PASSES = 32
LAST_PASSES = 16


@dataclass(frozen=True)
class StepTime:
    """Mean step time, its spread (0 for an exact period), and the period in passes if proven."""

    step_ns: float
    spread_ns: float
    period_passes: int | None


class PassBoundaries:
    """Collects pass ends; a pass's state is every op's end relative to the pass's anchor.

    The anchor is the end of the pass's last compute op. When the state of a pass equals that of
    an earlier one, all that follows repeats, since ops depend on nothing else.
    """

    def __init__(self) -> None:
        self._anchors_ns: list[int] = []
        self._states: dict[tuple[int, ...], int] = {}

    def add(self, end_ns: Sequence[int], anchor_ns: int) -> StepTime | None:
        """The step time, once the state repeats or enough passes have run."""
        state = tuple(end - anchor_ns for end in end_ns)
        number = len(self._anchors_ns)
        self._anchors_ns.append(anchor_ns)
        if (earlier := self._states.get(state)) is not None:
            period = number - earlier
            span_ns = anchor_ns - self._anchors_ns[earlier]
            return StepTime(span_ns / period, 0.0, period)
        self._states[state] = number
        return self.unproven() if number + 1 >= MAX_PASSES else None

    def unproven(self) -> StepTime:
        """Mean and spread of the later half of the passes, without a proof that they repeat; the
        length of a single pass."""
        count = len(self._anchors_ns)
        if count == 1:
            return StepTime(float(self._anchors_ns[0]), 0.0, None)
        recent = self._anchors_ns[-max(1, count // 2) - 1 :]
        steps = [after - before for before, after in pairwise(recent)]
        return StepTime(fmean(steps), pstdev(steps), None)
