"""A checkpoint's tensors: the model or its adapter as people have it, a file for each other."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from twinstream.executor.weights.durable_files import make_room, sync, writing
from twinstream.executor.weights.errors import WeightsError
from twinstream.schedule.files import open_file, reason_of

OPTIMIZER = "optimizer"
_SUFFIX = ".bin"


@dataclass(frozen=True)
class CheckpointFiles:
    """The tensors beside the weights, as they lie in the arenas: bytes without a header."""

    folder: Path

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, 1-D uint8.

        Raises:
            WeightsError: it is not there, or cannot be read.
        """
        path = self._path(name)
        try:
            size_bytes = path.stat().st_size
            flat = torch.empty(size_bytes, dtype=torch.uint8)
            with open_file(path) as file:
                read_bytes = file.readinto(flat.numpy().data)
        except OSError as error:
            raise WeightsError(path, f"cannot be read: {reason_of(error)}") from None
        if read_bytes != size_bytes:
            raise WeightsError(path, "has changed while it was read")
        return flat

    def write(self, names: Sequence[str], pieces: Callable[[str], Iterable[torch.Tensor]]) -> None:
        """Write tensors one after another; all are on the disk when this returns.

        Args:
            pieces: the bytes of a tensor in order, 1-D uint8 on the host.

        Raises:
            WeightsError: one cannot be written.
        """
        with writing(self.folder / OPTIMIZER, 0):
            (self.folder / OPTIMIZER).mkdir(exist_ok=True)
        for name in names:
            path, size_bytes = self._path(name), 0
            with writing(path, 0):
                file = path.open("wb")
            with file:
                for piece in pieces(name):
                    size_bytes += piece.numel()
                    with writing(path, size_bytes):
                        file.write(piece.numpy().data)
                        file.flush()
            with writing(path, size_bytes):
                sync(path)
        with writing(self.folder, 0):
            sync(self.folder / OPTIMIZER)

    def _path(self, name: str) -> Path:
        return self.folder / OPTIMIZER / f"{name}{_SUFFIX}"


def write_tensors(
    folder: Path,
    write: Callable[[Path, Callable[[str], torch.Tensor]], None],
    names: Sequence[str],
    take: Callable[[str], torch.Tensor],
    pieces: Callable[[str], Iterable[torch.Tensor]],
    size_bytes: int,
) -> None:
    """Write all tensors that a run trains: parameters a group at a time, others in pieces.

    Args:
        write: writes parameters into the folder, asking for a group after the other.
        names: those that the run carries, `param.GROUP` and others.
        take: gives one of them, 1-D uint8 on the host.
        pieces: gives the same in pieces, in order.
        size_bytes: of what is written, for which there has to be room.

    Raises:
        WeightsError: there is too little room, or a file cannot be written.
    """
    make_room(folder, size_bytes)

    def parameters(group: str) -> torch.Tensor:
        return take(f"param.{group}")

    write(folder, parameters)
    others = [name for name in names if not name.startswith("param.")]
    CheckpointFiles(folder).write(others, pieces)
