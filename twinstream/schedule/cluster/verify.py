"""Prove a schedule safe: that of every class of ranks, and all that ranks say to one another.

Linear in ops, waits and operands; in classes quadratic, by arithmetic on their cells. However many
ranks there are, none is listed.
"""

from collections.abc import Callable, Iterator

from twinstream.schedule.cluster.cells import ClassCells, partition_violations
from twinstream.schedule.cluster.communication import Communication
from twinstream.schedule.cluster.deadlock import deadlocks
from twinstream.schedule.cluster.meetings import Meetings
from twinstream.schedule.cluster.verify_order import OrderCheck
from twinstream.schedule.cluster.violations import (
    ClassUnsafe,
    ClusterViolation,
    OperandsUnsuited,
    SequenceWrong,
    UnknownAxis,
)
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import require
from twinstream.schedule.ops import Communicate
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.violations import UnsafeSchedule, Violation


def verify(schedule: Schedule) -> list[Violation]:
    """Return all that makes a schedule unsafe; an empty list proves that every execution is safe.

    Of several ranks it is a proof, too, that they agree in what they exchange and none is stuck.

    Every step needs what the steps before have shown, so only the first that finds anything
    reports: schedules and partition; axes; sequences and operands; what meets; order and deadlock.
    Each violation is a ClusterViolation and has the classes that are involved, but for one device's
    own.
    """
    require("schedule", schedule, Schedule)
    if schedule.is_one_device:
        return verify_rank(schedule.only)
    cells = ClassCells(schedule.mesh, schedule.classes)
    found: list[Violation] = [*_unsafe(schedule), *partition_violations(cells)]
    if found:
        return found
    names = _names(schedule)
    by_schedule = {name: Communication(schedule.schedules[name]) for name in names}
    found += _each(by_schedule, names, UnknownAxis, lambda one: one.axes_wrong(schedule.mesh))
    if found:
        return found
    found += _each(by_schedule, names, SequenceWrong, Communication.sequences_wrong)
    found += _each(
        by_schedule, names, OperandsUnsuited, lambda one: one.operands_wrong(schedule.mesh)
    )
    if found:
        return found
    communications = [by_schedule[one.schedule] for one in schedule.classes]
    meetings = Meetings(cells, communications)
    if meetings.violations:
        return [*meetings.violations]
    order = OrderCheck(cells, communications, meetings.found)
    return [*deadlocks(cells, communications, meetings.found), *order.run(schedule.order)]


def may_deadlock(schedule: Schedule) -> bool:
    """Whether ranks of a schedule that is otherwise safe may wait for one another for ever."""
    cells = ClassCells(schedule.mesh, schedule.classes)
    spoken = [Communication(schedule.of(one)) for one in schedule.classes]
    return bool(list(deadlocks(cells, spoken, Meetings(cells, spoken).found)))


def require_safe(schedule: Schedule) -> None:
    """Raise UnsafeSchedule unless `verify` finds nothing."""
    if found := verify(schedule):
        raise UnsafeSchedule(found)


def _names(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """By schedule, the classes that have it."""
    names: dict[str, tuple[str, ...]] = {}
    for one in schedule.classes:
        names[one.schedule] = (*names.get(one.schedule, ()), one.name)
    return names


def _unsafe(schedule: Schedule) -> Iterator[ClassUnsafe]:
    for name, classes in _names(schedule).items():
        for violation in verify_rank(schedule.schedules[name]):
            yield ClassUnsafe(
                f"{_called(classes)}: {violation}", violation.ops, violation.tensor,
                violation.slot, classes,
            )  # fmt: skip


def _each(
    by_schedule: dict[str, Communication],
    names: dict[str, tuple[str, ...]],
    kind: type[ClusterViolation],
    check: Callable[[Communication], Iterator[tuple[str, Communicate]]],
) -> Iterator[ClusterViolation]:
    """What a check says of the ops of each schedule, as violations of that kind."""
    for name, communication in by_schedule.items():
        for text, op in check(communication):
            what = f"op '{op.op_id}' ({op.collective}) of {_called(names[name])} {text}"
            yield kind(what, (op.op_id,), classes=names[name])


def _called(classes: tuple[str, ...]) -> str:
    more = f" (and {len(classes) - 1} more)" if len(classes) > 1 else ""
    return f"class '{classes[0]}'{more}"
