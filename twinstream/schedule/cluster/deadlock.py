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

Waits point backwards in issue order, so where the document's order is every class's own, only the
two sides of a ring step can wait for each other; any other cycle shows as a wrong order, too, and
is named here because it says why there is no right one.
"""

from bisect import bisect_right

from twinstream.schedule.cluster.cells import ClassCells
from twinstream.schedule.cluster.communication import Communication
from twinstream.schedule.cluster.meetings import Meeting
from twinstream.schedule.cluster.violations import Deadlock

_MOST_SHOWN = 6
Step = tuple[int, int]  # of ops by their numbers over all classes: one, and one that waits for it


class MeetingGraph:
    """Ops of all classes, numbered one class after the other; those that meet share a node.

    Edges are kept in flat lists, which the garbage collector need not walk through.
    """

    def __init__(
        self, cells: ClassCells, communications: list[Communication], meetings: list[Meeting]
    ) -> None:
        self.cells = cells
        self.communications = communications
        self.first: list[int] = []  # the number of a class's first op
        num_ops = 0
        for communication in communications:
            self.first.append(num_ops)
            num_ops += len(communication.schedule.ops)
        self.node_of = list(range(num_ops))
        self.members: dict[int, list[int]] = {}
        for meeting in meetings:
            ops = [self.first[number] + position for number, position in meeting]
            self.members[ops[0]] = ops
            for op in ops:
                self.node_of[op] = ops[0]
        # Per op the one before it on its stream, -1 if none, and per class what it waits for.
        self.predecessor: list[int] = []
        for number, communication in enumerate(communications):
            self._add_predecessors(self.first[number], communication)

    def _add_predecessors(self, first: int, communication: Communication) -> None:
        latest: dict[tuple[int, str], int] = {}
        for position, op in enumerate(communication.schedule.ops):
            stream = (op.stream.device, op.stream.queue)
            self.predecessor.append(latest.get(stream, -1))
            latest[stream] = first + position

    def before(self, op: int) -> list[int]:
        """Return what an op waits for in its pass: the op before on its stream, and its waits."""
        number = self.number_of(op)
        first, communication = self.first[number], self.communications[number]
        waits = communication.schedule.ops[op - first].waits
        found = [first + communication.position[wait] for wait in waits]
        return found if self.predecessor[op] < 0 else [self.predecessor[op], *found]

    def stuck(self) -> list[int]:
        """Per node how much of what it waits for never comes about; no deadlock if all are 0."""
        node_of = self.node_of
        left, newest = [0] * len(node_of), [-1] * len(node_of)  # of the edges out of a node
        older: list[int] = []
        target: list[int] = []
        op = 0
        for first, communication in zip(self.first, self.communications, strict=True):
            place = communication.position
            for one in communication.schedule.ops:
                node, predecessor = node_of[op], self.predecessor[op]
                waits = [first + place[wait] for wait in one.waits]
                for wait in waits if predecessor < 0 else [predecessor, *waits]:
                    left[node] += 1
                    older.append(newest[node_of[wait]])
                    newest[node_of[wait]] = len(target)
                    target.append(node)
                op += 1
        ready = [op for op, node in enumerate(node_of) if op == node and not left[op]]
        while ready:
            edge = newest[ready.pop()]
            while edge >= 0:
                node, edge = target[edge], older[edge]
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
                for wait in self.before(op)
                if left[self.node_of[wait]]
            )
            back.append(step)
            node = self.node_of[step[0]]
        return back[reached[node] :][::-1]

    def number_of(self, op: int) -> int:
        """The number of an op's class."""
        return bisect_right(self.first, op) - 1

    def place(self, op: int) -> tuple[str, str]:
        """The class of an op, and its id."""
        number = self.number_of(op)
        schedule = self.communications[number].schedule
        return self.cells.names[number], schedule.ops[op - self.first[number]].op_id


def deadlocks(
    cells: ClassCells, communications: list[Communication], meetings: list[Meeting]
) -> list[Deadlock]:
    """One violation that shows one cycle, if there is any. Schedules must be safe in themselves.

    Linear in ops, waits and sides.
    """
    graph = MeetingGraph(cells, communications, meetings)
    left = graph.stuck()
    if not any(left):
        return []
    legs = _legs(graph, graph.cycle(left))
    before = graph.place(legs[0][0])
    text, places = "/".join(before), [before]
    for at, (_, end) in enumerate(legs[:_MOST_SHOWN]):
        after, met = graph.place(end), graph.place(legs[(at + 1) % len(legs)][0])
        text += f" -> {'/'.join(after)}" + ("" if met == after else f" = {'/'.join(met)}")
        places += [after, met]
    if len(legs) > _MOST_SHOWN:
        text += f" -> ... ({len(legs) - _MOST_SHOWN} more)"
    ops, classes = (tuple(dict.fromkeys(place[i] for place in places)) for i in (1, 0))
    why = "what waits comes round (a -> b: b waits for a, a = b: they meet)"
    return [Deadlock(f"{why}: {text}", ops, classes=classes)]


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
