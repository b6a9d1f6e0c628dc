"""Documents and machines that commands are given, checked so far that they can be worked with."""

import json
from pathlib import Path
from typing import TypeVar

from twinstream.documents import require_sound
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import DocumentError, called, read_bytes, read_document
from twinstream.schedule.node import Node
from twinstream.schedule.timeline import Timeline

_Document = TypeVar("_Document", bound=Node)


def read_schedule(path: Path) -> Schedule:
    """The schedule in a file, as it is.

    Raises:
        DocumentError: there is none; says what is wrong and where.
    """
    return read_as(Schedule, path)


def checked_schedule(path: Path) -> Schedule:
    """A schedule that is safe and computes what it says.

    Raises:
        DocumentError: there is no schedule in the file.
        UnsafeSchedule: it is damaged in its meaning.
    """
    schedule = read_schedule(path)
    require_sound(schedule)
    return schedule


def predicted_and_measured(predicted: Path, measured: Path) -> tuple[Timeline, Timeline]:
    """The timelines in two files.

    Raises:
        DocumentError: one of them is none, or they are in each other's place.
    """
    before, after = read_as(Timeline, predicted), read_as(Timeline, measured)
    if after.provenance.kind != "measured" and before.provenance.kind != "measured":
        raise DocumentError(f"{measured} is simulated, too: give what `run -o` wrote")
    if (before.provenance.kind, after.provenance.kind) == ("measured", "simulated"):
        raise DocumentError(
            f"{predicted} is measured and {measured} is simulated; give the prediction first"
        )
    return before, after


def read_timelines(
    predicted: Path | None, measured: Path | None, option: str = "--measured"
) -> tuple[Timeline | None, Timeline | None]:
    """The timelines in the files that are given.

    Raises:
        DocumentError: a file holds none, or one of the other kind.
    """
    found: list[Timeline | None] = []
    for path, kind in ((predicted, "simulated"), (measured, "measured")):
        timeline = None if path is None else read_as(Timeline, path)
        if timeline is not None and timeline.provenance.kind != kind:
            raise DocumentError(
                f"{path} is {timeline.provenance.kind}, not {kind}; --predicted takes what "
                f"`simulate -o` wrote, {option} what `run -o` wrote"
            )
        found.append(timeline)
    return found[0], found[1]


def read_as(kind: type[_Document], path: Path) -> _Document:
    """The document of a kind in a file.

    Raises:
        DocumentError: there is none; says what is wrong, or which other document it is.
    """
    try:
        return read_document(kind, path)
    except DocumentError:
        if (other := kind_in(path)) not in (None, kind):
            assert other is not None
            raise DocumentError(f"{path} is a {called(other)}, not a {called(kind)}") from None
        raise


def kind_in(path: Path) -> type[Node] | None:
    """What a file holds by its top-level keys; None if it is no document of ours."""
    keys = top_level_keys(path)
    for kind in (ClusterSchedule, ClusterTimeline, Schedule, Timeline):
        required = {name for name, field in kind.model_fields.items() if field.is_required()}
        if required <= keys:
            return kind
    return None


def top_level_keys(path: Path) -> set[str]:
    """Of the JSON in a file; none if there is none."""
    try:
        return set(json.loads(read_bytes(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return set()
