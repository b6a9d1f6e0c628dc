"""Restore what an evaluation overwrites: the state that training carries from pass to pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinstream.planner.evaluate.dataflow import Dataflow
from twinstream.planner.evaluate.errors import NoEvaluation
from twinstream.schedule.chain import Chain
from twinstream.schedule.derived.disk_copies import DiskCopies
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import DISK_READ, DISK_WRITE, Copy, Op, Stream
from twinstream.schedule.proof.accesses import Access, AccessMap
from twinstream.schedule.proof.memory_cells import GARBAGE, MemoryCell, MemoryCells
from twinstream.schedule.tensors import Carried

# From a kind of memory to one, where training itself copies no state so.
_BY_CONVENTION = {
    ("host", "device"): Stream(queue="h2d"),
    ("device", "host"): Stream(queue="d2h"),
    ("device", "device"): Stream(queue="compute"),
    ("host", "host"): Stream(queue="d2h"),
    ("disk", "device"): Stream(queue="h2d"),  # by way of the host, and so is the way back
    ("device", "disk"): Stream(queue="d2h"),
    ("disk", "host"): Stream(queue=DISK_READ),
    ("host", "disk"): Stream(queue=DISK_WRITE),
}


def with_state_kept(
    training: RankSchedule,
    chain: Chain,
    flow: Dataflow,
    kept: Mapping[int, Op],
    results: Sequence[Op],
) -> tuple[Op, ...]:
    """Return the kept ops and the results, with ops that save and restore what they overwrite.

    Args:
        flow: of the training's ops, up to the last one of the forward.
        kept: by position in the training; with every op that makes what they read.
        results: what follows them.

    Raises:
        NoEvaluation: something carried is overwritten, and the training saves it nowhere before.
    """
    ops = dict(kept)
    while True:
        in_order = [*(ops[position] for position in sorted(ops)), *results]
        state = _State(training, chain, in_order)
        without = {leaf for lost in state.lost for leaf in lost.leaves if not state.holders(leaf)}
        if not without:
            return (*in_order, *_restored(training, state, in_order))
        saves = flow.needed_by(_first_saves(training, state.map, flow.num_ops, ops, without))
        if saves <= ops.keys():
            name = state.map.leaves[min(without)]
            raise NoEvaluation(
                f"the forward overwrites '{name}', which the schedule carries from step to step "
                "and saves nowhere before: plan again, or with another policy"
            )
        ops |= {position: training.ops[position] for position in saves - ops.keys()}


def _first_saves(
    training: RankSchedule,
    accesses: AccessMap,
    num_ops: int,
    kept: Mapping[int, Op],
    leaves: set[int],
) -> set[int]:
    """For each leaf the first copy left out of what a pass begins with, which is version 0."""
    found: dict[int, int] = {}
    for position, op in enumerate(training.ops[:num_ops]):
        if op.kind != "copy" or op.version or position in kept:
            continue
        for access in accesses.of(op):
            if access.leaf in leaves:
                found.setdefault(access.leaf, position)
    return set(found.values())


@dataclass(frozen=True)
class _Lost:
    """Something carried, of which these leaves are no longer where it is carried."""

    carried: Carried
    leaves: tuple[int, ...]


class _State:
    """Where what a pass begins with lies when it ends."""

    def __init__(self, training: RankSchedule, chain: Chain, ops: Sequence[Op]) -> None:
        self.map = AccessMap(chain.tensors, training.slots)
        self.carried = training.carried
        self._memory = [MemoryCells() for _ in self.map.tiers]
        self._places: dict[int, dict[tuple[int, int, int], str]] = {}
        for item in training.carried:
            tier, ranges = self.map.ranges(item.tensor, item.slot, None)
            for start, end, leaf in ranges:
                self._put(Access(tier, start, end, leaf, 0, "write", item.tensor, item.slot))
        for op in ops:
            for access in self.map.of(op):
                if access.mode != "read":
                    self._put(access)
        self.lost = [lost for item in training.carried if (lost := self._lost(item)).leaves]

    def holders(self, leaf: int) -> list[str]:
        """Slots in which the leaf is as it was when the pass began."""
        places = self._places.get(leaf, {})
        return [slot for place, slot in places.items() if self._holds(place, leaf)]

    def _put(self, access: Access) -> None:
        tier, start, end, leaf = access.tier, access.start, access.end, access.leaf
        made = access.version + (access.mode == "update")
        if access.mode == "scratch":
            leaf = GARBAGE
        self._memory[tier].replace(MemoryCell(start, end, leaf, made, 0, 0))
        if leaf != GARBAGE and made == 0:
            self._places.setdefault(leaf, {})[tier, start, end] = access.slot

    def _lost(self, item: Carried) -> _Lost:
        tier, ranges = self.map.ranges(item.tensor, item.slot, None)
        leaves = [
            leaf
            for start, end, leaf in ranges
            if leaf != GARBAGE and not self._holds((tier, start, end), leaf)
        ]
        return _Lost(item, tuple(leaves))

    def _holds(self, place: tuple[int, int, int], leaf: int) -> bool:
        tier, start, end = place
        cell = self._memory[tier].exactly(start, end)
        return cell is not None and (cell.leaf, cell.version) == (leaf, 0)


def _restored(training: RankSchedule, state: _State, ops: Sequence[Op]) -> list[Copy]:
    """Copies that put back what was lost; first what the next pass asks for first."""
    first_use: dict[str, int] = {}
    for position, op in enumerate(ops):
        for access in state.map.of(op):
            first_use.setdefault(state.map.leaves[access.leaf], position)
    lost = sorted(
        state.lost,
        key=lambda one: min(first_use.get(state.map.leaves[n], len(ops)) for n in one.leaves),
    )
    streams, by_disk = _streams(training, state.map), DiskCopies(state.map, training.ops)
    back = [copy for one in lost for copy in _copies_back(state, one, streams)]
    return [copy for one in back for copy in by_disk.by_host(one)]


def _copies_back(
    state: _State, lost: _Lost, streams: Mapping[tuple[str, str], Stream]
) -> list[Copy]:
    """One copy of the whole where all of it is gone and one slot has it, else leaf by leaf."""
    item, slots = lost.carried, state.map.slots
    all_leaves = [n for *_, n in state.map.ranges(item.tensor, item.slot, None)[1] if n != GARBAGE]
    common = [s for s in state.holders(lost.leaves[0]) if s != item.slot]
    for leaf in lost.leaves[1:]:
        common = [slot for slot in common if slot in state.holders(leaf)]
    if len(lost.leaves) == len(all_leaves) and common:
        wanted = [(item.tensor, common[0])]
    else:
        wanted = [(state.map.leaves[n], state.holders(n)[0]) for n in lost.leaves]
    destination = slots[item.slot].tier.kind
    return [
        Copy(
            op_id=f"restore.{tensor}.{item.slot}",
            stream=streams[slots[source].tier.kind, destination],
            tensor=tensor,
            version=0,
            source=source,
            destination=item.slot,
        )
        for tensor, source in wanted
    ]


def _streams(training: RankSchedule, accesses: AccessMap) -> dict[tuple[str, str], Stream]:
    """By kinds of memory, from and to, the stream on which training copies state so."""
    found: dict[tuple[str, str], Stream] = {}
    persistent, slots = {item.tensor for item in training.carried}, accesses.slots
    for op in training.ops:
        if op.kind == "copy" and op.tensor in persistent:
            kinds = slots[op.source].tier.kind, slots[op.destination].tier.kind
            found.setdefault(kinds, op.stream)
    return _BY_CONVENTION | found
