"""Which segments are alike, so that rounds share their graphs and their events.

Two executables of a class alternate, each with its own events. Two segments may share one if they
do the same work on the same bytes and their waits are then for the same events. That is found by
refinement, as in the minimization of automata: begin with equal work, split what differs in what
it waits for, until nothing does. Two passes are looked at, since a class that occurs an odd number
of times in a pass begins the next one with its other executable.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from twinstream.executor.graph_segments import Segment
from twinstream.executor.program import Program

NUM_PARITIES = 2
Instance = tuple[int, int]
"""Parity of the pass, index of the segment."""
EventKey = tuple[int, int, int]
"""Class, which of its two executables, and the place of the op in the segment."""


@dataclass(frozen=True)
class GraphClasses:
    """For both parities of a pass: class and executable of every segment."""

    class_of: Mapping[Instance, int]
    executable: Mapping[Instance, int]

    def event_key(self, instance: Instance, place: int) -> EventKey:
        """Which event an op of a segment records."""
        return self.class_of[instance], self.executable[instance], place


def classify(
    program: Program, segments: Sequence[Segment], content: Sequence[Hashable]
) -> GraphClasses:
    """Classes as large as the waits allow; `content` says of every op what it does, and on what.

    A wait takes the latest record of its event. Where that would be one of a later round, the
    segment that was meant gets a class of its own.
    """
    places = _Places(program, segments)
    alone: set[int] = set()
    while True:
        classes = _refined(program, segments, content, places, alone)
        overtaken = _overtaken(program, segments, places, classes) - alone
        if not overtaken:
            return classes
        alone |= overtaken


class _Places:
    """Where every op lies: (segment, place in it), and what each segment's device ops wait for."""

    def __init__(self, program: Program, segments: Sequence[Segment]) -> None:
        self.of = {
            position: (number, place)
            for number, segment in enumerate(segments)
            for place, position in enumerate(segment.positions)
        }
        host = {launch.position for launch in program.launches if launch.on_host}
        self.waits: list[list[tuple[int, int, int]]] = []
        """By segment: (place of the op that waits, position waited for, passes ago)."""
        for segment in segments:
            found = []
            for place, position in enumerate(segment.positions):
                launch = program.launches[position]
                for ago, waits in enumerate((launch.waits, launch.waits_previous)):
                    found += [(place, wait, ago) for wait in waits if wait not in host]
            self.waits.append(found)


def _refined(
    program: Program,
    segments: Sequence[Segment],
    content: Sequence[Hashable],
    places: _Places,
    alone: set[int],
) -> GraphClasses:
    instances = [(q, s) for q in range(NUM_PARITIES) for s in range(len(segments))]
    work: list[Hashable] = [
        (
            segment.stream,
            segment.captured,
            number if number in alone else None,
            tuple((content[p], program.launches[p].records) for p in segment.positions),
        )
        for number, segment in enumerate(segments)
    ]
    class_of = _numbered({instance: work[instance[1]] for instance in instances})
    while True:
        executable = _alternating(instances, class_of)
        refined = _numbered(
            {
                (q, s): (
                    class_of[q, s],
                    tuple(
                        (place, *_relative((q, s), wait, ago, places, class_of, executable))
                        for place, wait, ago in places.waits[s]
                    ),
                )
                for q, s in instances
            }
        )
        if len(set(refined.values())) == len(set(class_of.values())):
            return GraphClasses(class_of, executable)
        class_of = refined


def _relative(
    own: Instance,
    wait: int,
    ago: int,
    places: _Places,
    class_of: Mapping[Instance, int],
    executable: Mapping[Instance, int],
) -> tuple[int, int, int]:
    """What a wait is for, seen from the one who waits: class, same or other executable, place."""
    segment, place = places.of[wait]
    target = ((own[0] + ago) % NUM_PARITIES, segment)
    return class_of[target], executable[target] ^ executable[own], place


def _alternating(
    instances: Sequence[Instance], class_of: Mapping[Instance, int]
) -> dict[Instance, int]:
    count: dict[int, int] = {}
    executable = {}
    for instance in instances:
        number = count.get(class_of[instance], 0)
        count[class_of[instance]] = number + 1
        executable[instance] = number % 2
    return executable


def _numbered(keys: Mapping[Instance, Hashable]) -> dict[Instance, int]:
    numbers: dict[Hashable, int] = {}
    return {instance: numbers.setdefault(key, len(numbers)) for instance, key in keys.items()}


def _overtaken(
    program: Program, segments: Sequence[Segment], places: _Places, classes: GraphClasses
) -> set[int]:
    """Segments whose event is recorded again before someone waits for it."""
    latest: dict[EventKey, tuple[int, int]] = {}
    found: set[int] = set()
    for number in range(2 * NUM_PARITIES):
        for s, segment in enumerate(segments):
            own = (number % NUM_PARITIES, s)
            for _, wait, ago in places.waits[s]:
                target, place = places.of[wait]
                key = classes.event_key(((own[0] + ago) % NUM_PARITIES, target), place)
                if number >= ago and latest.get(key) != (number - ago, target):
                    found.add(target)
            for place, position in enumerate(segment.positions):
                if program.launches[position].records:
                    latest[classes.event_key(own, place)] = (number, s)
    return found
