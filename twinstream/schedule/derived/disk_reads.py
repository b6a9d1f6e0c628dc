"""Copies that bring content from a disk to where a derived schedule wants it again."""

from collections.abc import Sequence

from twinstream.schedule.ops import Copy, Op, Stream
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.tensors import DISK


class DiskReads:
    """What a schedule's own reads say of how content comes from a disk: through which host slots.

    Args:
        ops: of the schedule.
    """

    def __init__(self, access_map: AccessMap, ops: Sequence[Op]) -> None:
        self._map = access_map
        self._read_of: dict[int, Copy] = {}
        for op in ops:
            if isinstance(op, Copy) and access_map.slots[op.source].tier == DISK:
                for _, _, leaf in access_map.ranges(op.tensor, op.source, op.num_parts)[1]:
                    self._read_of.setdefault(leaf, op)

    def to_device(self, copy: Copy) -> list[Copy]:
        """Return a copy from memory as it is, and of one from a disk reads and the copy from there.

        A disk has no link to the device: what is asked for is read into host memory first.
        """
        if self._map.slots[copy.source].tier != DISK:
            return [copy]
        leaves = [n for *_, n in self._map.ranges(copy.tensor, copy.source, copy.num_parts)[1]]
        reads = dict.fromkeys(read.op_id for n in leaves if (read := self._read_of.get(n)))
        known = {read.op_id: read for read in self._read_of.values()}
        between = [known[op_id] for op_id in reads]
        assert between, "what is on a disk is read from there"
        return [
            *(
                read.model_copy(update={"op_id": f"{copy.op_id}.{number}", "waits": ()})
                for number, read in enumerate(between)
            ),
            copy.model_copy(
                update={"source": between[0].destination, "stream": Stream(queue="h2d")}
            ),
        ]
