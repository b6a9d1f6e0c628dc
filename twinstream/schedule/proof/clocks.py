"""Vector clocks: which ops have surely completed when another starts."""

from twinstream.schedule.ops import Op


class StreamOrder:
    """Ops and streams numbered; every op's stream and its index on that stream within a pass.

    `waits` and `waits_previous` have the numbers of the ops waited for, -1 of one there is not.
    """

    def __init__(self, ops: tuple[Op, ...]) -> None:
        self.names: list[str] = []
        self.length: list[int] = []
        self.stream_of: list[int] = []
        self.index_of: list[int] = []
        self.positions_on: list[list[int]] = []
        self.position: dict[str, int] = {}
        numbers: dict[tuple[int, str], int] = {}
        for position, op in enumerate(ops):
            key = (op.stream.device, op.stream.queue)
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(self.names)
                self.names.append(str(op.stream))
                self.length.append(0)
                self.positions_on.append([])
            self.position[op.op_id] = position
            self.positions_on[number].append(position)
            self.stream_of.append(number)
            self.index_of.append(self.length[number])
            self.length[number] += 1
        find = self.position.get
        self.waits = [tuple([find(wait, -1) for wait in op.waits]) for op in ops]
        self.waits_previous = [tuple([find(wait, -1) for wait in op.waits_previous]) for op in ops]


class Clocks:
    """Clocks of ops as they are issued, over consecutive passes.

    A clock holds, per stream, how many of its ops (counted over all passes) have completed.
    """

    def __init__(self, order: StreamOrder) -> None:
        self.order = order
        self._done_on_stream: list[list[int]] = [[0] * len(order.names) for _ in order.names]
        self.completed: list[list[int]] = []
        self.completed_previous: list[list[int]] = []
        self._pass_index = 0

    def next_pass(self) -> None:
        self.completed_previous, self.completed = self.completed, []
        self._pass_index += 1

    def index(self, position: int) -> int:
        """Index of op `position` on its stream, counted over all passes."""
        stream = self.order.stream_of[position]
        return self.order.index_of[position] + self._pass_index * self.order.length[stream]

    def predecessor(self, position: int) -> list[int]:
        """A fresh copy of the clock that the stream predecessor left."""
        return self._done_on_stream[self.order.stream_of[position]].copy()

    def complete(self, position: int, start_clock: list[int]) -> None:
        """Record the op's completion; ops complete in issue order of their stream."""
        stream = self.order.stream_of[position]
        # who waits for this op knows all that it knew at its start, and that it is over itself
        done = start_clock.copy()
        done[stream] = self.index(position) + 1
        self._done_on_stream[stream] = done
        self.completed.append(done)


def merge(clock: list[int], other: list[int]) -> None:
    """Take over what `other` knows: the least upper bound of two clocks, stream by stream."""
    for i, count in enumerate(other):
        if count > clock[i]:
            clock[i] = count
