"""Where the streams of a pipeline's stage stand, and how they go on."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from twinstream.simulator.blocks import COMPUTE, IrregularError, StageProgram
from twinstream.simulator.states import (
    AHEAD,
    ARRIVED,
    BEHIND,
    FAR,
    FRESH,
    MEETS,
    NEAR,
    WAITS,
    StageState,
    States,
    StreamState,
)


class PipelineStage:
    """Where the streams of a stage stand, by blocks from that of compute."""

    def __init__(self, states: States, program: StageProgram) -> None:
        self.program, self._states = program, states
        self._numbers = [states.interned.number(one) for one in program.blocks]
        self._kinds = np.array(self._numbers)
        self._views: dict[tuple[int, int], int] = {}
        count = len(program.blocks[0].streams)
        self._with_ops: list[list[int]] = [[] for _ in range(count)]
        for at, block in enumerate(program.blocks):
            for number, ops in enumerate(block.streams):
                if ops:
                    self._with_ops[number].append(at)
        self.base = 0
        self.pass_ends_ns: list[int] = []
        first = [one[0] if one else len(program.blocks) for one in self._with_ops]
        self.streams = [StreamState(at, 0, FRESH) for at in first]
        self.far: dict[int, int] = {}  # blocks of streams that are far ahead, or have no more ops
        for number, at in enumerate(first):
            if at > AHEAD or at == len(program.blocks):
                self.far[number] = at
                self.streams[number] = StreamState(AHEAD + 1, 0, FAR)

    @property
    def is_over(self) -> bool:
        return self.far.get(COMPUTE, 0) == len(self.program.blocks)

    def _next_block(self, stream: int, after: int) -> int:
        found = self._with_ops[stream]
        at = bisect_right(found, after)
        return found[at] if at < len(found) else len(self.program.blocks)

    def at(self, stream: int) -> tuple[int, int]:
        """Block and place of a stream's op."""
        one = self.streams[stream]
        if one.block > AHEAD:
            return self.far[stream], 0
        return self.base + one.block, one.place

    def take(self, streams: Sequence[StreamState], moved: int) -> None:
        """Stand where a run has left the streams."""
        far, base = self.far, self.base
        self.streams = list(streams)
        for number, one in enumerate(streams):
            if one.does == FAR and number not in far:
                far[number] = self._next_block(number, base + AHEAD)
                if number == COMPUTE and not self.is_over:
                    raise IrregularError
        self.base = base = base + moved
        for number, at in list(far.items()) if far and moved else ():
            if at - base <= AHEAD and at < len(self.program.blocks):
                del far[number]
                does = self.streams[number].does
                self.streams[number] = StreamState(at - base, 0, NEAR if does == FAR else does)

    def times_again(self, blocks: int, far: Mapping[int, int]) -> int:
        """How often the last so many blocks come again, before blocks or streams differ.

        Args:
            far: where streams that are far ahead were before these blocks.
        """
        reach, least = AHEAD, len(self._numbers)
        if far.keys() != self.far.keys():
            return 0
        for number, at in self.far.items():
            if at == far[number]:
                least = min(least, (at - AHEAD - 1 - self.base) // blocks)
            elif at == far[number] + blocks:
                reach = max(reach, at - self.base)
            else:
                return 0
        begin = max(0, self.base - blocks - BEHIND)
        differ = np.flatnonzero(self._kinds[begin:-blocks] != self._kinds[begin + blocks :])
        end = begin + int(differ[0]) if len(differ) else len(self._kinds) - blocks
        return min(least, (end - 1 - reach - self.base) // blocks + 1)

    def go_on(self, blocks: int, far: Mapping[int, int]) -> None:
        """Stand so many blocks further on, and streams that went on with them, too."""
        self.base += blocks
        self.far = {
            number: at if at == far[number] else at + blocks for number, at in self.far.items()
        }

    def pass_message(self, stream: int) -> bool:
        """Go on behind an op that has met others; return whether the next has arrived, too."""
        at, place = self.at(stream)
        blocks = self.program.blocks
        place += 1
        if place == len(blocks[at].streams[stream]):
            at, place = self._next_block(stream, at), 0
        self.far.pop(stream, None)
        if at - self.base > AHEAD or at == len(blocks):
            self.far[stream] = at
            self.streams[stream] = StreamState(AHEAD + 1, 0, FAR)
        else:
            self.streams[stream] = StreamState(at - self.base, place, WAITS)
        return self.look(stream)

    def look(self, stream: int) -> bool:
        """Whether a stream's op can come to its meeting by now, though far ahead of compute."""
        at, place = self.at(stream)
        if at == len(self.program.blocks):
            return False
        for ahead, other, where in self.program.blocks[at].streams[stream][place].waits:
            if (at + ahead, where) >= self.at(other):
                return False
        self.streams[stream] = StreamState(self.streams[stream].block, place, ARRIVED)
        return True

    def meet(self, stream: int) -> None:
        """The op's message begins."""
        one = self.streams[stream]
        self.streams[stream] = StreamState(one.block, one.place, MEETS)

    @property
    def state(self) -> StageState:
        lowest = min([one.block for one in self.streams])
        key = self.base, min(lowest, 0)
        if key not in self._views:
            if lowest < -BEHIND:
                raise IrregularError
            base, count = self.base, len(self._numbers)
            near = range(max(0, base + key[1]), count)
            around = range(base - BEHIND, base + AHEAD + 1)
            view = tuple([self._numbers[at] if at in near else -1 for at in around])
            self._views[key] = self._states.blocks_around(view)
        return self._views[key], tuple(self.streams)
