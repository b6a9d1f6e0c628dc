"""The packed sequences in a slot as the host knows them, for calls that it enqueues after that.

Where sequences start is data of the run, on the device when attention runs. But the host has fed
it, and a library that is told the longest launches blocks for no longer ones. The host enqueues
ops in an order in which what is read has been written, so that a note follows its bytes: it is made
where they are fed, and goes along where they are copied.
"""

from collections.abc import Sequence

import torch

from twinstream.executor.kernels.operand import Pack
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.program.compiled import Work
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Copy, Feed

_SEQUENCES = "sequences."


def noting_packs(schedule: RankSchedule, arenas: Arenas, works: Sequence[Work]) -> list[Work]:
    """The works, of which those that feed or copy starts of sequences note them in the arenas."""
    packing = schedule.workload.packing
    assert packing is not None, "sequences of any lengths are packed"
    num_starts = packing.most_sequences + 1
    found = []
    for op, work in zip(schedule.ops, works, strict=True):
        noting = work
        if isinstance(op, Feed) and op.tensor.startswith(_SEQUENCES):
            noting = _fed(work, arenas, arenas.view(op.tensor, op.slot), num_starts)
        elif isinstance(op, Copy) and op.tensor.startswith(_SEQUENCES):
            noting = _copied(work, arenas, *arenas.copy_views(op))
        found.append(noting)
    return found


def _fed(work: Work, arenas: Arenas, slot: torch.Tensor, num_starts: int) -> Work:
    def fed(pass_index: int) -> None:
        work(pass_index)
        if not arenas.follows_packs:
            return
        lengths = slot.view(torch.int32)[:num_starts].diff()
        arenas.packs[slot.data_ptr()] = Pack(int(lengths.max()), int(lengths.count_nonzero()))

    return fed


def _copied(work: Work, arenas: Arenas, source: torch.Tensor, destination: torch.Tensor) -> Work:
    def copied(pass_index: int) -> None:
        work(pass_index)
        arenas.packs.pop(destination.data_ptr(), None)
        if (pack := arenas.packs.get(source.data_ptr())) is not None:
            arenas.packs[destination.data_ptr()] = pack

    return copied
