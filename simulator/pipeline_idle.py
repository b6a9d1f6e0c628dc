"""What compute waits for in the last pass of a pipeline; blocks that went alike are one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinstream.schedule.analysis.idle import BUBBLE, CAUSES, LATENCY
from twinstream.simulator.blocks import COMPUTE, Block, BlockOp, StageProgram
from twinstream.simulator.pipeline import PassLog, Repetition
from twinstream.simulator.states import StateChange

_BACK = 6  # blocks before one in which what released its ops is looked for
_Ints = NDArray[np.int64]


class IdleTimes(NamedTuple):
    """Of a stage: how long something takes, and what its compute waits for in it."""

    took_ns: int
    causes_ns: dict[str, int]


@dataclass(frozen=True)
class BlockReleases:
    """An op, so many blocks back: its number there, by what compute waits while it runs, and the
    nodes that release it. `is_asked`: compute of the block itself."""

    back: int
    number: int
    cause: str
    meets: bool
    released_by: tuple[int, ...]
    is_asked: bool


def idle_times(
    programs: Sequence[StageProgram],
    log: PassLog,
    repetition: Repetition | None,
    known: dict[tuple[int, ...], list[BlockReleases]],
) -> tuple[list[IdleTimes], list[IdleTimes]]:
    """Return where the last of two passes goes, of every stage, and where a repetition does.

    A pass is from the end of compute in the pass before to its own. A gap is followed back from
    the compute op that ends it, as `schedule.analysis.idle` does.

    Args:
        known: what may release the ops of blocks, by their identities; that of new ones is added.
    """
    times = _Times(programs, log)
    totals = np.zeros((len(programs), len(CAUSES)), dtype=np.int64)
    again = totals.copy()
    begins, ends = np.zeros((2, len(programs)), dtype=np.int64)
    if repetition is not None:
        begins = np.array(repetition.begins)
        ends = begins + repetition.blocks
    views: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    blocks: dict[int, Block] = {}
    for stage, program in enumerate(programs):
        count = len(program.blocks) // 2
        blocks |= {id(block): block for block in program.blocks}
        ids = [id(block) for block in program.blocks]
        for at in range(count, 2 * count):
            views.setdefault(tuple(ids[max(0, at - _BACK) : at + 1]), []).append((stage, at))
    for view, places in views.items():
        if view not in known:
            known[view] = _nodes([blocks[one] for one in view])
        nodes = known[view]
        stages, at = np.array(places, dtype=np.int64).T
        caused: dict[bytes, list[int]] = {}
        repeats = (at >= begins[stages]) & (at < ends[stages])
        rows = times.of(stages, at, nodes)
        for stage, row, is_again in zip(stages.tolist(), rows, repeats.tolist(), strict=True):
            key = row.tobytes()
            if key not in caused:
                caused[key] = _causes(nodes, row.reshape(3, -1).tolist())
            totals[stage] += caused[key]
            if is_again:
                again[stage] += caused[key]
    period_ns = repetition.period_ns if repetition else 0
    return (
        [_told(ns, total) for ns, total in zip(times.steps_ns, totals, strict=True)],
        [_told(period_ns, total) for total in again],
    )


def _told(took_ns: int, causes_ns: _Ints) -> IdleTimes:
    return IdleTimes(
        took_ns, {name: int(ns) for name, ns in zip(CAUSES, causes_ns, strict=True) if ns}
    )


def _nodes(view: Sequence[Block]) -> list[BlockReleases]:
    """Ops of the last block and the one before, and what may release them."""
    last = len(view) - 1
    keys: dict[tuple[int, int, int], int] = {}
    for at in range(last, max(-1, last - 2), -1):
        for stream, ops in enumerate(view[at].streams):
            keys |= {(at, stream, place): len(keys) + place for place in range(len(ops))}
    own = list(keys)
    released: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for at, stream, place in own:
        by = [
            (at + ahead, other, where) for ahead, other, where in _op(view, at, stream, place).waits
        ]
        before = _before(view, at, stream, place)
        by += [] if before is None else [before]
        released[at, stream, place] = tuple(
            [keys.setdefault(one, len(keys)) for one in by if one[0] >= 0]
        )
    found = []
    for key in keys:
        at, stream, place = key
        op = _op(view, *key)
        found.append(
            BlockReleases(
                last - at, view[at].begins[stream] + place, op.cause, op.price is None,
                released.get(key, ()), at == last and stream == COMPUTE,
            )
        )  # fmt: skip
    return found


def _op(view: Sequence[Block], at: int, stream: int, place: int) -> BlockOp:
    return view[at].streams[stream][place]


def _before(view: Sequence[Block], at: int, stream: int, place: int) -> tuple[int, int, int] | None:
    """The op before on its stream."""
    if place:
        return at, stream, place - 1
    while at:
        at -= 1
        if count := len(view[at].streams[stream]):
            return at, stream, count - 1
    return None


class _Times:
    """When ops began and ended in the last pass, and shortly before."""

    def __init__(self, programs: Sequence[StageProgram], log: PassLog) -> None:
        counts = [len(program.blocks) // 2 for program in programs]
        self._first = np.array([max(0, count - _BACK - 1) for count in counts])
        self._rows = max(2 * n - first for n, first in zip(counts, self._first, strict=True)) + 1
        widths = {id(one): one.begins[-1] for program in programs for one in program.blocks}
        self._width = max(widths.values())
        size = len(programs) * self._rows * self._width
        self._at = np.zeros((3, size), dtype=np.int64)  # starts, ends, when all sides had come
        self._fill(log)
        self._fill_messages(programs, log)
        ends = self._compute_ends(programs)
        rows = np.arange(len(programs))
        last = ends[rows, np.array(counts) * 2 - 1 - self._first]
        before = ends[rows, np.array(counts) - 1 - self._first]
        self.steps_ns = (last - before).tolist()
        self._since = np.concatenate(
            [np.zeros((len(programs), 1), dtype=np.int64), ends[:, :-1]], axis=1
        )

    def _fill(self, log: PassLog) -> None:
        uses: dict[int, list[tuple[StateChange, int, tuple[int, ...], tuple[int, ...]]]] = {}
        for use in log.changes:
            uses.setdefault(id(use[0]), []).append(use)
        for same in uses.values():
            (change, *_), *_ = same
            if not change.times:
                continue
            member, block, number, is_end, at_ns = np.array(change.times, dtype=np.int64).T
            since = np.array([one[1] for one in same], dtype=np.int64)[:, None]
            stage = np.array([one[2] for one in same], dtype=np.int64)[:, member]
            row = np.array([one[3] for one in same], dtype=np.int64)[:, member] + block
            row -= self._first[stage]
            place = (stage * self._rows + row) * self._width + number
            is_near = row >= 0
            kind = np.broadcast_to(is_end, place.shape)
            self._at[kind[is_near], place[is_near]] = (since + at_ns)[is_near]

    def _fill_messages(self, programs: Sequence[StageProgram], log: PassLog) -> None:
        self._at[2] = self._at[0]
        places, times = [], []
        for stage, at, stream, place, *told in log.messages:
            row = at - int(self._first[stage])
            if row >= 0:
                number = programs[stage].blocks[at].begins[stream] + place
                places.append((stage * self._rows + row) * self._width + number)
                times.append(told)
        if places:
            came, begun, over = np.array(times, dtype=np.int64).T
            self._at[0, places], self._at[2, places], self._at[1, places] = came, begun, over

    def _compute_ends(self, programs: Sequence[StageProgram]) -> _Ints:
        """By stage and row, when the last compute op so far had ended."""
        found = np.zeros((len(programs), self._rows), dtype=np.int64)
        ends = self._at[1].reshape(len(programs), self._rows, self._width)
        for stage, program in enumerate(programs):
            first = int(self._first[stage])
            counts = [len(block.streams[COMPUTE]) for block in program.blocks[first:]]
            rows = np.arange(len(counts))
            numbers = np.array(counts)
            some = numbers > 0  # compute is the first of a block's streams
            found[stage, rows[some]] = ends[stage, rows[some], numbers[some] - 1]
        latest: _Ints = np.maximum.accumulate(found, axis=1)
        return latest

    def of(self, stages: _Ints, at: _Ints, nodes: Sequence[BlockReleases]) -> _Ints:
        """Starts, ends and meetings of nodes, from the end of compute in the blocks before."""
        row = at - self._first[stages]
        back = np.array([node.back for node in nodes])
        number = np.array([node.number for node in nodes])
        rows = row[:, None] - back
        places = (stages[:, None] * self._rows + np.maximum(rows, 0)) * self._width + number
        since = self._since[stages, row]
        found = self._at[:, places].transpose(1, 0, 2) - since[:, None, None]
        found[np.broadcast_to((rows < 0)[:, None, :], found.shape)] = 0
        clipped: _Ints = np.maximum(found, 0).reshape(len(stages), -1)
        return clipped


def _causes(nodes: Sequence[BlockReleases], times: Sequence[Sequence[int]]) -> list[int]:
    """What gaps of a block are put down to."""
    starts, ends, begun = times
    total = dict.fromkeys(CAUSES, 0)
    free_ns = 0
    for at, node in enumerate(nodes):
        if not node.is_asked:
            continue
        start_ns = max(free_ns, starts[at])
        now_ns, current = start_ns, at
        while now_ns > free_ns:
            by = nodes[current].released_by
            current = max(by, key=ends.__getitem__, default=-1)
            if current < 0:
                total[LATENCY] += now_ns - free_ns
                break
            ended_ns = min(now_ns, max(free_ns, ends[current]))
            total[LATENCY] += now_ns - ended_ns
            one = nodes[current]
            begun_ns = min(ended_ns, max(free_ns, begun[current]))
            total[one.cause] += ended_ns - begun_ns
            now_ns = begun_ns
            if one.meets:
                came_ns = min(now_ns, max(free_ns, starts[current]))
                total[BUBBLE] += now_ns - came_ns
                now_ns = came_ns
        free_ns = max(start_ns, ends[at])
    return list(total.values())
