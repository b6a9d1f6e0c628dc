"""Does every communication come about? Ops that meet are one node; the graph has no cycle.

Sides that meet are through only when all have begun, and an op begins when its stream predecessor
and its waits are through. So with an edge to every op from those two, and all sides of a meeting
made one node, the ops come about in any topological order, and none on a cycle ever does.

One pass says it all. `waits_previous` and the order of a stream lead from a pass to the next, the
other edges stay in one. What meets has equally many ops a pass on all sides, so that the k-th op of
one pass meets the k-th of the same pass. No edge leads back, every cycle lies in one pass, and all
passes are alike.

Classes stand for ranks. Among ranks, a cycle would be a closed walk here. A cycle here is one
there, too: wherever an op of a class waits for another, so does that of each of its ranks, and each
instance of a meeting has a rank of every class that takes part; one can walk back for ever, and
ranks are finite.
"""

from itertools import pairwise

from twinstream.schedule.cluster.cells import ClassCells
from twinstream.schedule.cluster.communication import Communication
from twinstream.schedule.cluster.meetings import Meeting
from twinstream.schedule.cluster.violations import Deadlock
from twinstream.schedule.proof.clocks import StreamOrder

_MOST_SHOWN = 6
Step = tuple[int, int]  # of ops by their numbers over all classes: one, and one that waits for it


class MeetingGraph:
    """Ops of all classes, numbered one class after the other; those that meet share a node."""

    def __init__(
        self, cells: ClassCells, spoken: list[Communication], meetings: list[Meeting]
    ) -> None:
        self.cells = cells
        self.spoken = spoken
        self.first: list[int] = []  # the number of a class's first op
        self.num_ops = 0
        for communication in spoken:
            self.first.append(self.num_ops)
            self.num_ops += len(communication.schedule.ops)
        self.node_of = list(range(self.num_ops))
        self.members: dict[int, list[int]] = {}
        for meeting in meetings:
            ops = [self.first[number] + position for number, position in meeting]
            self.members[ops[0]] = ops
            for op in ops:
                self.node_of[op] = ops[0]
        self.before = self._before()

    def _before(self) -> list[list[int]]:
        """Per op what it waits for in its pass: waits, and the one before it on its stream."""
        made: dict[int, list[list[int]]] = {}  # by schedule, which classes may share
        before: list[list[int]] = []
        for first, communication in zip(self.first, self.spoken, strict=True):
            key = id(communication)
            if key not in made:
                order = StreamOrder(communication.schedule.ops)
                made[key] = [list(waits) for waits in order.waits]
                for positions in order.positions_on:
                    for one, after in pairwise(positions):
                        made[key][after].append(one)
            before += [[first + position for position in positions] for positions in made[key]]
        return before

    def stuck(self) -> list[int]:
        """Per node how much of what it waits for never comes about; no deadlock if all are 0."""
        node_of = self.node_of
        left = [0] * self.num_ops
        after: list[list[int]] = [[] for _ in range(self.num_ops)]
        for op, waits in enumerate(self.before):
            node = node_of[op]
            left[node] += len(waits)
            for wait in waits:
                after[node_of[wait]].append(node)
        ready = [node for node in range(self.num_ops) if not left[node] and node_of[node] == node]
        while ready:
            for node in after[ready.pop()]:
                left[node] -= 1
                if not left[node]:
                    ready.append(node)
        return left

    def cycle(self, left: list[int]) -> list[Step]:
        """Steps of a cycle among the nodes that are left, each from where the one before leads."""
        node = next(node for node, count in enumerate(left) if count)
        reached: dict[int, int] = {}
        back: list[Step] = []
        while node not in reached:
            reached[node] = len(back)
            step = next(
                (wait, op)
                for op in self.members.get(node, [node])
                for wait in self.before[op]
                if left[self.node_of[wait]]
            )
            back.append(step)
            node = self.node_of[step[0]]
        return back[reached[node] :][::-1]

    def place(self, op: int) -> tuple[str, str]:
        """The class of an op, and its id."""
        number = max(n for n, first in enumerate(self.first) if first <= op)
        schedule = self.spoken[number].schedule
        return self.cells.names[number], schedule.ops[op - self.first[number]].op_id


def deadlocks(
    cells: ClassCells, spoken: list[Communication], meetings: list[Meeting]
) -> list[Deadlock]:
    """One violation that shows one cycle, if there is any. Schedules must be safe in themselves.

    Linear in ops, waits and sides.
    """
    graph = MeetingGraph(cells, spoken, meetings)
    left = graph.stuck()
    if not any(left):
        return []
    legs = _legs(graph, graph.cycle(left))
    shown = [tuple(graph.place(op) for op in leg) for leg in legs[:_MOST_SHOWN]]
    path = " = ".join(" -> ".join(f"{name}/{op_id}" for name, op_id in leg) for leg in shown)
    more = (
        f"... ({len(legs) - _MOST_SHOWN} more)"
        if len(legs) > _MOST_SHOWN
        else "/".join(shown[0][0])
    )
    text = f"what waits comes round (a -> b: b waits for a, a = b: they meet): {path} = {more}"
    places = [place for leg in shown for place in leg]
    classes = tuple(dict.fromkeys(name for name, _ in places))
    return [Deadlock(text, tuple(dict.fromkeys(op_id for _, op_id in places)), classes=classes)]


def _legs(graph: MeetingGraph, steps: list[Step]) -> list[Step]:
    """The cycle from meeting to meeting; what a class does in between is left out.

    There is a meeting on it: within a class, waits point backwards.
    """
    meets = [graph.node_of[before] in graph.members for before, _ in steps]
    start = meets.index(True)
    legs: list[Step] = []
    for (before, after), begins in zip(
        steps[start:] + steps[:start], meets[start:] + meets[:start], strict=True
    ):
        legs.append((before, after) if begins else (legs.pop()[0], after))
    return legs
