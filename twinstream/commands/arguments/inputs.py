"""Documents and machines that commands are given, checked so far that they can be worked with."""

import json
from pathlib import Path
from typing import Literal, TypeVar

from twinstream.clusters.conforms import conforms
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import DocumentError, called, read_bytes, read_document
from twinstream.schedule.node import MeshDocument, Node
from twinstream.schedule.proof.violations import UnsafeSchedule
from twinstream.schedule.timeline import Timeline

_Document = TypeVar("_Document", bound=Node)


def checked_schedule(path: Path) -> Schedule:
    """Read a schedule that is safe and, of one device, computes what it says.

    Raises:
        DocumentError: there is no schedule in the file.
        UnsafeSchedule: it is damaged in its meaning.
    """
    schedule = read_as(Schedule, path)
    require_sound(schedule)
    return schedule


def require_sound(schedule: Schedule) -> None:
    """Refuse a schedule that is not safe or, of one device, computes something else than it says.

    Raises:
        UnsafeSchedule: says in what.
    """
    found = verify(schedule)
    if not found and schedule.is_one_device:
        found = conforms(schedule)
    if found:
        raise UnsafeSchedule(found)


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


def read_timeline(
    path: Path, kind: Literal["simulated", "measured"], option: str = "--measured"
) -> Timeline:
    """Read a timeline.

    Raises:
        DocumentError: the file holds none, or one of the other kind.
    """
    timeline = read_as(Timeline, path)
    if timeline.provenance.kind != kind:
        raise DocumentError(
            f"{path} is {timeline.provenance.kind}, not {kind}; --predicted takes what "
            f"`simulate -o` wrote, {option} what `run -o` wrote"
        )
    return timeline


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
    """Say what a file holds by its top-level keys; None if it is no document of ours."""
    try:
        keys = set(json.loads(read_bytes(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    kinds: tuple[type[MeshDocument], ...] = (Schedule, Timeline)
    for kind in kinds:
        for form in (kind, kind.rank_kind):
            if {name for name, field in form.model_fields.items() if field.is_required()} <= keys:
                return kind
    return None
