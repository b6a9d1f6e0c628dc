"""The arena of a disk: slots are tensors that files have, where they lie."""

from bisect import bisect_right
from dataclasses import dataclass

import torch

from twinstream.executor.weights.disk_reader import DiskFiles, DiskReader
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.tensors import DISK


@dataclass(frozen=True, order=True)
class _Home:
    """Bytes of the arena, which are those of a tensor from `origin` on."""

    start: int
    end: int
    tensor: str
    origin: int


class DiskArena:
    """An arena that is only read, by the addresses of a schedule's slots.

    Raises:
        TwinstreamError: the schedule has something on a disk that no file has.
    """

    def __init__(self, schedule: RankSchedule, files: DiskFiles | None) -> None:
        slots = {slot.slot_id: slot for slot in schedule.slots if slot.tier == DISK}
        parents = {tensor.tensor_id: tensor.parent for tensor in schedule.tensors}
        self._homes = sorted(
            _Home(
                slot.offset_bytes, slot.offset_bytes + slot.size_bytes,
                parents[item.tensor] or item.tensor, slot.origin_bytes,
            )
            for item in schedule.carried
            if (slot := slots.get(item.slot)) is not None
        )  # fmt: skip
        known = {} if files is None else files.extents
        if without := [home.tensor for home in self._homes if home.tensor not in known]:
            raise TwinstreamError(
                f"{len(without)} tensors of the schedule are at home on a disk ('{without[0]}'), "
                "and no file has them here: `twinstream train MODEL DATA --disk PATH` plans and "
                "runs with such"
            )
        assert files is not None or not self._homes
        self._extents = known
        self._reader = None if files is None else DiskReader(files)

    def read(self, start: int, stop: int, destination: torch.Tensor) -> None:
        """Fill a destination, 1-D uint8 on the host, with the bytes from `start` to `stop`.

        Raises:
            WeightsError: a file cannot be read, or has changed.
        """
        assert self._reader is not None, "there are files"
        home = self._homes[bisect_right(self._homes, start, key=lambda home: home.start) - 1]
        assert home.start <= start <= stop <= home.end, "a slot holds what is read"
        low = home.origin + start - home.start
        found = (one.within(low, low + stop - start) for one in self._extents[home.tensor])
        self._reader.read([one for one in found if one is not None], destination)

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        """Bytes of the arena, read anew."""
        found = torch.empty(wanted.stop - wanted.start, dtype=torch.uint8)
        self.read(wanted.start, wanted.stop, found)
        return found

    def fill_(self, value: int) -> None:
        """Leave files as they are."""

    def numel(self) -> int:
        """Return the bytes from the first slot to the end of the last."""
        return max((home.end for home in self._homes), default=0)

    def close(self) -> None:
        """Close the files."""
        if self._reader is not None:
            self._reader.close()
