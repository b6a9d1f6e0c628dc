"""Documents and machines that commands are given, checked so far that they can be worked with."""

import json
from pathlib import Path
from typing import TypeVar

from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower_again
from twinstream.schedule.chain import Chain
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, called, read_bytes, read_document
from twinstream.schedule.node import Node
from twinstream.schedule.proof.conforms import require_conforming
from twinstream.schedule.proof.verify import require_safe
from twinstream.schedule.timeline import Timeline

_Document = TypeVar("_Document", bound=Node)


class UnknownMachineError(TwinstreamError):
    """A schedule's machine is no shipped one, and none was given."""


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
    require_safe(schedule)
    require_conforming(schedule, chain_of(schedule))
    return schedule


def chain_of(schedule: Schedule) -> Chain:
    """The chain that a schedule says it was planned for.

    Raises:
        TwinstreamError: its model or recipe is not valid, or far too large for its ops.
    """
    work, layers = schedule.workload, schedule.model.spec.get("num_layers")
    blocks = work.rounds_per_step * work.chunks_per_round * (layers if type(layers) is int else 1)
    if blocks > len(schedule.ops):  # do not lower what a slip made astronomical
        raise DocumentError(
            f"the schedule's workload and model have {blocks:,} blocks to compute, but it has only "
            f"{len(schedule.ops):,} ops; is 'workload' or 'model' damaged?"
        )
    return lower_again(schedule)


def predicted_and_measured(predicted: Path, measured: Path) -> tuple[Timeline, Timeline]:
    """The timelines in two files.

    Raises:
        DocumentError: one of them is none, or they are in each other's place.
    """
    before, after = read_as(Timeline, predicted), read_as(Timeline, measured)
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


def machine_of(schedule: Schedule, given: str | None) -> Machine:
    """The machine given, else the shipped one that the schedule was planned for.

    Raises:
        UnknownMachineError: none was given, and the schedule's is not a shipped one as it is.
    """
    if given is not None:
        return load_machine(given)
    name, planned_for = schedule.machine.name, schedule.machine.content_hash
    if name not in machine_names():
        raise UnknownMachineError(
            f"the schedule was planned for machine '{name}', which is no shipped profile; "
            "give its profile: --machine FILE.toml"
        )
    shipped = load_machine(name)
    if shipped.content_hash != planned_for:
        raise UnknownMachineError(
            f"the schedule was planned for another '{name}' ({planned_for}) than the shipped one "
            f"({shipped.content_hash}); give its profile: --machine FILE.toml, or the shipped one "
            f"all the same: --machine {name}"
        )
    return shipped


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
