"""The waits that say something: those that stream order and the other waits do not imply."""

from dataclasses import dataclass

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.proof.clocks import Clocks, StreamOrder, merge


@dataclass(frozen=True)
class NeededWaits:
    """Per op, the positions of the ops that it still has to wait for.

    `previous` are ops of the pass before. `awaited` has every position that some op waits for.
    """

    order: StreamOrder
    same_pass: tuple[tuple[int, ...], ...]
    previous: tuple[tuple[int, ...], ...]
    awaited: frozenset[int]


def needed_waits(schedule: RankSchedule) -> NeededWaits:
    """The transitive reduction of a schedule's waits, over two passes, which is all of them.

    A path of happens-before from an op of the pass before crosses the boundary once, so what
    holds between the first two passes holds between all later ones; and what orders two ops of
    one pass lies in that pass, so the reduction is the same in the first.
    """
    order = StreamOrder(schedule.ops)
    clocks = Clocks(order)
    same = [tuple(dict.fromkeys(waits)) for waits in order.waits]
    before = [tuple(dict.fromkeys(waits)) for waits in order.waits_previous]
    for at in range(len(schedule.ops)):
        _complete(clocks, at, same[at], ())
    clocks.next_pass()
    kept_same, kept_before = [], []
    for at in range(len(schedule.ops)):
        kept = _not_implied(clocks, at, same[at], before[at])
        kept_same.append(kept[0])
        kept_before.append(kept[1])
        _complete(clocks, at, same[at], before[at])
    awaited = frozenset(w for waits in (*kept_same, *kept_before) for w in waits)
    return NeededWaits(order, tuple(kept_same), tuple(kept_before), awaited)


def _complete(clocks: Clocks, at: int, same: tuple[int, ...], before: tuple[int, ...]) -> None:
    clock = clocks.predecessor(at)
    for wait in same:
        merge(clock, clocks.completed[wait])
    for wait in before:
        merge(clock, clocks.completed_previous[wait])
    clocks.complete(at, clock)


def _not_implied(
    clocks: Clocks, at: int, same: tuple[int, ...], before: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is left of an op's waits when those that another one implies are gone."""
    stream_of, length = clocks.order.stream_of, clocks.order.length
    known = [(wait, clocks.completed[wait], clocks.index(wait)) for wait in same]
    known += [
        (wait, clocks.completed_previous[wait], clocks.index(wait) - length[stream_of[wait]])
        for wait in before
    ]
    predecessor = clocks.predecessor(at)
    kept = []
    for number, (wait, _, index) in enumerate(known):
        stream = stream_of[wait]
        # a wait is implied if the stream predecessor, or another wait, has the op behind it
        implied = predecessor[stream] > index or any(
            other[stream] > index for i, (_, other, _) in enumerate(known) if i != number
        )
        kept.append(not implied)
    return (
        tuple(wait for wait, keep in zip(same, kept[: len(same)], strict=True) if keep),
        tuple(wait for wait, keep in zip(before, kept[len(same) :], strict=True) if keep),
    )
