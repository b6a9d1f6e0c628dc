"""The works of a rank's Communicate ops: views of its arenas, groups, and scratch memory for sums.

Nothing deadlocks. A stream is a thread (or a CUDA stream), and an op blocks its own alone. So what
an op waits for is what `verify` says: its stream predecessor, its waits, and that all sides
have begun; that has no cycle. What the executor adds leads to earlier passes (a pass is not begun
before the one two before it is through) or, on CUDA, to ops that the rank issues earlier (the
dispatching thread waits for the host): there the document's one order of all exchanges, which every
rank issues its part in, has none.
"""

from collections.abc import Mapping

import torch

from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.program.compiled import Work
from twinstream.executor.ranks.collectives import Meeting, calls_of
from twinstream.executor.ranks.groups import ChannelGroup
from twinstream.executor.ranks.reductions import Reduction, reductions_of
from twinstream.executor.ranks.waiting import Waiting, watched
from twinstream.schedule.cluster.projecting import Channel, RankPart
from twinstream.schedule.ops import Communicate, Stream
from twinstream.schedule.proof.accesses import AccessMap


class RankCommunications:
    """Binds ops to arenas, as `bind_works` asks it to.

    Sums in rank order take memory beside the arenas, `scratch_bytes`. It is allocated here, once;
    ops of a stream have it in turn.

    Raises:
        ReductionError: something of a type that is not added up is to be.
    """

    def __init__(
        self,
        part: RankPart,
        groups: Mapping[Channel, ChannelGroup],
        waiting: Waiting,
        device: torch.device,
    ) -> None:
        self.part = part
        self._groups = {op_id: groups[channel] for op_id, channel in part.channels.items()}
        self._waiting = waiting
        self._reductions = _reductions(part, self._groups)
        sizes: dict[Stream, int] = {}
        for op in part.schedule.ops:
            if isinstance(op, Communicate):
                needs = [one.scratch_bytes for one in self._reductions[op.op_id]]
                sizes[op.stream] = max([*needs, sizes.get(op.stream, 0)])
        self.scratch_bytes = sum(sizes.values())
        self._scratch = {
            stream: torch.empty(size, dtype=torch.uint8, device=device)
            for stream, size in sizes.items()
        }

    def __call__(self, op: Communicate, arenas: Arenas) -> Work:
        group = self._groups[op.op_id]
        meeting = Meeting(
            op,
            arenas.in_order(op),
            group,
            self._reductions[op.op_id],
            self._scratch[op.stream],
        )
        peers = [rank for rank in group.members if rank != self.part.rank]
        return watched(self.part, op, peers, calls_of(meeting), self._waiting)


def _reductions(part: RankPart, groups: Mapping[str, ChannelGroup]) -> dict[str, list[Reduction]]:
    """By op."""
    access_map = AccessMap(part.schedule.tensors, ())
    found = {}
    for op in part.schedule.ops:
        if isinstance(op, Communicate):
            extents = [access_map.extent(o.tensor, o.num_parts) for o in op.operands]
            sizes = [end - start for start, end in extents]
            dtypes = [access_map.tensors[o.tensor].dtype for o in op.operands]
            found[op.op_id] = reductions_of(op, sizes, dtypes, groups[op.op_id].size)
    return found
