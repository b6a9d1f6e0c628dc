"""The calls of a backend, in the order in which the dispatch loop makes them."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from twinstream.executor.program.compiled import Launch
from twinstream.schedule.timeline import PassSpans

EventT = TypeVar("EventT")

PASSES_AHEAD = 2
"""A pass is not begun before the one so many passes earlier has completed."""


@dataclass(frozen=True)
class MeasuredPass:
    """When a pass ended (its last compute op), and the spans of its ops if those were timed."""

    end_ns: int
    spans: PassSpans | None


class Backend(Protocol[EventT]):
    """Enqueues work on streams; only `begin_pass` and work that the host must have done block it.

    `waited_ns` is how long the dispatching thread has been blocked so far.
    """

    waited_ns: int

    def begin_pass(self, number: int, *, timed: bool) -> None:
        """Announce a pass; returns once the one `PASSES_AHEAD` before it has completed."""

    def wait(self, launch: Launch, event: EventT) -> None:
        """The op does not start before `event` has happened."""

    def launch(self, launch: Launch) -> None:
        """Enqueue the op's work on its stream."""

    def record(self, launch: Launch) -> EventT:
        """An event that happens when the op, enqueued just before, has completed."""

    def synchronize(self) -> None:
        """Return when everything enqueued has completed. Raises what went wrong in a stream."""

    def finish(self) -> list[MeasuredPass]:
        """Wait for everything; return when each pass ended. Raises what went wrong in a stream."""

    def abort(self) -> None:
        """Let nothing new start, and return when nothing runs any more."""
