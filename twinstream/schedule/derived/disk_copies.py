"""Copies between a disk and the device that a derived schedule adds: by way of host memory."""

from collections.abc import Sequence

from twinstream.schedule.ops import DISK_READ, DISK_WRITE, Copy, Op, Stream
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.tensors import DEVICE, DISK


class DiskCopies:
    """What a schedule's own copies say of the way to and from a disk: through which host slots.

    Args:
        ops: of the schedule.
    """

    def __init__(self, access_map: AccessMap, ops: Sequence[Op]) -> None:
        self._map = access_map
        self._through: dict[int, str] = {}  # by leaf
        for op in ops:
            if not isinstance(op, Copy) or op.tensor not in access_map.tensors:
                continue  # the map of an evaluation has no gradients
            if DISK in (self._tier(op.source), self._tier(op.destination)):
                slot = op.destination if self._tier(op.source) == DISK else op.source
                for leaf in self._leaves(op, op.source):
                    self._through.setdefault(leaf, slot)

    def by_host(self, copy: Copy) -> list[Copy]:
        """Return the copies that one stands for: a disk has no link to the device, so that what is
        copied between these is in host memory in between."""
        source, destination = self._tier(copy.source), self._tier(copy.destination)
        if DISK not in (source, destination):
            return [copy]
        reads = source == DISK
        by_disk = copy.model_copy(
            update={"stream": Stream(queue=DISK_READ if reads else DISK_WRITE), "waits": ()}
        )
        if DEVICE not in (source, destination):
            return [by_disk]
        slot = self._through[self._leaves(copy, copy.source)[0]]
        first, last = (by_disk, copy) if reads else (copy, by_disk)
        stream = Stream(queue="h2d" if reads else "d2h")
        by_link = {"stream": stream, "waits": ()}
        first_id = {"op_id": f"{copy.op_id}.0", "destination": slot}
        return [
            first.model_copy(update=({} if reads else by_link) | first_id),
            last.model_copy(update=(by_link if reads else {}) | {"source": slot}),
        ]

    def _tier(self, slot: str) -> object:
        return self._map.slots[slot].tier

    def _leaves(self, copy: Copy, slot: str) -> list[int]:
        return [leaf for *_, leaf in self._map.ranges(copy.tensor, slot, copy.num_parts)[1]]
