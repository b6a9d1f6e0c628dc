"""What a backend must do: a handful of calls, in the order the dispatch loop makes them."""

from typing import Protocol, TypeVar

from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, Stream

EventT = TypeVar("EventT")


class Backend(Protocol[EventT]):
    """Enqueues work on streams. Calls only enqueue; nothing here waits for the device."""

    def wait(self, stream: Stream, event: EventT) -> None:
        """The next op on `stream` does not start before `event` has happened."""

    def compute(self, op: Compute) -> None:
        """Enqueue a kernel on views of its slots."""

    def copy(self, op: Copy) -> None:
        """Enqueue a copy between two slots."""

    def host(self, op: Feed | Fetch) -> None:
        """Enqueue what the host does: fill a slot, or take a result out."""

    def record(self, stream: Stream) -> EventT:
        """An event that happens when what was enqueued on `stream` so far has completed."""

    def finish(self) -> list[tuple[int, int]]:
        """Wait for everything; (start, end) in ns of every op, in the order they were enqueued."""
