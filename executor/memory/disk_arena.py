"""The arena of a disk: slots are tensors that files have, where they lie, or bytes of a file of the
run's own."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinstream.executor.weights.disk_reader import DiskFiles, DiskReader, DriveClock, FileExtent
from twinstream.executor.weights.state_file import StateFile
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Copy
from twinstream.schedule.tensors import DISK, Slot


@dataclass(frozen=True, order=True)
class _Home:
    """Bytes of the arena, which are those of a tensor from `origin` on."""

    start: int
    end: int
    tensor: str
    origin: int


class DiskArena:
    """An arena by the addresses of a schedule's slots.

    What is only read lies in files that are there already, anything else in one of the run's own.

    Raises:
        TwinstreamError: the schedule has something on a disk, and no place for it.
        WeightsError: a drive has too little room.
    """

    def __init__(self, schedule: RankSchedule, files: DiskFiles | None) -> None:
        slots = {slot.slot_id: slot for slot in schedule.slots if slot.tier == DISK}
        parents = {tensor.tensor_id: tensor.parent for tensor in schedule.tensors}
        known = {} if files is None else files.extents
        written = {op.destination for op in schedule.ops if isinstance(op, Copy)}
        filed = {
            item.slot: root
            for item in schedule.carried
            if item.slot in slots.keys() - written
            and (root := parents[item.tensor] or item.tensor) in known
        }
        self._homes = sorted(
            _Home(slot.offset_bytes, slot.offset_bytes + slot.size_bytes, root, slot.origin_bytes)
            for slot_id, root in filed.items()
            for slot in (slots[slot_id],)
        )
        own = [slot for name, slot in slots.items() if name not in filed]
        if own and (files is None or files.place is None):
            raise TwinstreamError(
                f"{len(own)} tensors of the schedule are at home on a disk ('{own[0].slot_id}'), "
                "and no folder of a drive is named here: --disk PATH"
            )
        self._extents = known
        self._own: StateFile | None = None
        self._reader: DiskReader | None = None
        if files is not None:
            drive = DriveClock(files.overlap)
            if own:
                self._own = StateFile(files, _ranges(own), drive)
            handles = None if self._own is None else {self._own.path: self._own.handle}
            self._reader = DiskReader(files, handles, drive)

    def is_file(self, start: int) -> bool:
        """Return whether a byte is of a file that is only read, so that it is there already."""
        return self._home(start) is not None

    def read(self, start: int, stop: int, destination: torch.Tensor) -> None:
        """Fill a destination, 1-D uint8 on the host, with the bytes from `start` to `stop`.

        Raises:
            WeightsError: a file cannot be read, or has changed.
        """
        assert self._reader is not None, "there are files"
        if (home := self._home(start)) is None:
            assert self._own is not None, "what no file has is in the run's own"
            extents = [FileExtent(self._own.path, start, stop - start, 0)]
        else:
            assert stop <= home.end, "a slot holds what is read"
            low = home.origin + start - home.start
            found = (one.within(low, low + stop - start) for one in self._extents[home.tensor])
            extents = [one for one in found if one is not None]
        self._reader.read(extents, destination)

    def write(self, start: int, source: torch.Tensor) -> None:
        """Write a source, 1-D uint8 on the host, from a byte on.

        Raises:
            WeightsError: it cannot be written.
        """
        assert self._own is not None and not self.is_file(start), "files of others are only read"
        self._own.write(start, source)

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        """Bytes of the arena, read anew."""
        found = torch.empty(wanted.stop - wanted.start, dtype=torch.uint8)
        self.read(wanted.start, wanted.stop, found)
        return found

    def fill_(self, value: int) -> None:
        """Leave files as they are."""

    def numel(self) -> int:
        """Return the bytes from the first slot to the end of the last file that is only read."""
        return max((home.end for home in self._homes), default=0)

    def close(self) -> None:
        """Close the files; the run's own is gone."""
        if self._reader is not None:
            self._reader.close()
        if self._own is not None:
            self._own.close()

    def _home(self, start: int) -> _Home | None:
        at = bisect_right(self._homes, start, key=lambda home: home.start) - 1
        return self._homes[at] if at >= 0 and start < self._homes[at].end else None


def _ranges(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """The bytes that slots take, in whole blocks, which no two ranges share."""
    block, found = DISK.alignment_bytes, list[tuple[int, int]]()
    for slot in sorted(slots, key=lambda slot: slot.offset_bytes):
        start, end = slot.offset_bytes, slot.offset_bytes + slot.size_bytes
        end = -(-end // block) * block
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
