"""Segments that are alike, so that rounds share their graphs and their events.

Ops that do the same on the same bytes take turns with two events, whatever segment they are in.
Segments whose ops are the same and wait for and record the same events share an executable, and
two take turns there too. Two passes are looked at: an op that occurs an odd number of times in a
pass begins the next one with its other event.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from twinstream.executor.program.compiled import Program
from twinstream.executor.replay.graph_segments import Segment
from twinstream.models.kernel_costs.attributes import PLACES_A_ROUND
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.tensors import Tier

NUM_PARITIES = 2


@dataclass(frozen=True)
class GraphClasses:
    """For both parities of a pass: the event of every op, by position (None: it needs none on
    the device), and the executable of every segment.
    """

    events: tuple[tuple[int | None, ...], ...]
    executables: tuple[tuple[int, ...], ...]


def contents(schedule: RankSchedule) -> list[Hashable]:
    """Return what every op does and on which bytes: equal ops can share their calls and a graph."""
    access_map = AccessMap(schedule.tensors, schedule.slots)

    def where(tensor: str, slot: str, num_parts: int | None) -> tuple[Tier, int, int]:
        return access_map.slots[slot].tier, *access_map.address(tensor, slot, num_parts)

    found: list[Hashable] = []
    for op in schedule.ops:
        if isinstance(op, Compute):
            used = [(o.name, o.mode, where(o.tensor, o.slot, o.num_parts)) for o in op.operands]
            # What draws random numbers draws others in each round, which versions tell apart.
            draws = PLACES_A_ROUND in schedule.calls[op.call].attributes
            versions = tuple(o.version for o in op.operands) if draws else ()
            found.append((op.call, tuple(used), versions))
        elif isinstance(op, Copy):
            ends = [where(op.tensor, slot, op.num_parts) for slot in (op.source, op.destination)]
            found.append(tuple(ends))
        else:
            found.append(op.op_id)
    return found


def classify(
    program: Program, segments: Sequence[Segment], content: Sequence[Hashable]
) -> GraphClasses:
    """Events and executables as few as the waits allow; `content` is that of every op.

    A wait takes the latest record of its event. Where that would be one of a later round, the op
    that was meant gets events of its own.
    """
    number_of: dict[Hashable, int] = {}
    kinds = [number_of.setdefault(found, len(number_of)) for found in content]
    alone: set[int] = set()
    while True:
        events = _alternating_events(program, kinds, alone)
        overtaken = _overtaken(program, segments, events)
        if not overtaken:
            return GraphClasses(events, _executables(program, segments, kinds, events))
        alone |= overtaken


def _alternating_events(
    program: Program, kinds: Sequence[int], alone: set[int]
) -> tuple[tuple[int | None, ...], ...]:
    numbers: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    awaited_by_host = program.awaited_by_host()  # their events are of another sort
    rows: list[tuple[int | None, ...]] = []
    for _ in range(NUM_PARITIES):
        row: list[int | None] = []
        for launch in program.launches:
            at = launch.position
            if launch.on_host or not launch.records:
                row.append(None)
                continue
            own = at if at in alone else None
            kind = (launch.stream, kinds[at], at in awaited_by_host, own)
            turn = count.get(kind, 0)
            count[kind] = turn + 1
            row.append(numbers.setdefault((kind, turn % 2), len(numbers)))
        rows.append(tuple(row))
    return tuple(rows)


def _overtaken(
    program: Program,
    segments: Sequence[Segment],
    events: Sequence[Sequence[int | None]],
) -> set[int]:
    """Ops whose event is recorded again before someone waits for it."""
    latest: dict[int, tuple[int, int]] = {}
    found: set[int] = set()
    for number in range(2 * NUM_PARITIES):
        for segment in segments:
            for position in segment.positions:
                launch = program.launches[position]
                for ago, waits in enumerate((launch.waits, launch.waits_previous)):
                    if number < ago:
                        continue
                    for wait in waits:
                        event = events[(number - ago) % NUM_PARITIES][wait]
                        if event is not None and latest.get(event) != (number - ago, wait):
                            found.add(wait)
            for position in segment.positions:
                event = events[number % NUM_PARITIES][position]
                if event is not None:
                    latest[event] = (number, position)
    return found


def _executables(
    program: Program,
    segments: Sequence[Segment],
    kinds: Sequence[int],
    events: Sequence[Sequence[int | None]],
) -> tuple[tuple[int, ...], ...]:
    numbers: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    rows = []
    for parity in range(NUM_PARITIES):
        own, before = events[parity], events[(parity + 1) % NUM_PARITIES]
        row = []
        for segment in segments:
            ops = tuple(
                (
                    kinds[at],
                    own[at],
                    tuple(own[wait] for wait in program.launches[at].waits),
                    tuple(before[wait] for wait in program.launches[at].waits_previous),
                )
                for at in segment.positions
            )
            work = (segment.stream, tuple(kinds[at] for at in segment.positions))
            turn = count.get(work, 0)
            count[work] = turn + 1
            row.append(numbers.setdefault((work, ops, turn % 2), len(numbers)))
        rows.append(tuple(row))
    return tuple(rows)
