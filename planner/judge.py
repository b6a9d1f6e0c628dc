"""The judge of plans: a simulator, passed in by the front door."""

from collections.abc import Callable
from typing import Protocol

from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import PassSpans


class Judged(Protocol):
    """What a judge says: the step time, and the last passes; a `Timeline` says it, too."""

    @property
    def step_ns(self) -> float: ...

    @property
    def passes(self) -> tuple[PassSpans, ...]: ...


Judge = Callable[[Schedule], Judged]
