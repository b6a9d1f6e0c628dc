"""The checkpoints of a run: folders that are whole, or are none."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pydantic import Field, NonNegativeInt

from twinstream.data.order import Position
from twinstream.executor.weights.durable_files import sync, whole_folder, writing
from twinstream.models.adapters.lora import ADAPTERS
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_document, told, write_document, write_text
from twinstream.schedule.node import Node
from twinstream.schedule.workload import Workload

STATE_FILE, COMPLETE = "training.json", "COMPLETE"
_PREFIX, _PARTIAL = "checkpoint-", ".partial"


class CheckpointError(TwinstreamError):
    """A checkpoint cannot be written or gone on from."""


class DataPosition(Node):
    """Where the data goes on; as `twinstream.data.order.Position`."""

    epoch: NonNegativeInt = 0
    group: NonNegativeInt = 0
    chunk: NonNegativeInt = 0
    order: str = ""

    @classmethod
    def of(cls, position: Position) -> "DataPosition":
        return cls(**asdict(position))

    def position(self) -> Position:
        return Position(**self.model_dump())


class TrainingState(Node):
    """Beside the tensors, all that decides how a run goes on.

    Attributes:
        num_steps: of the whole run, which the learning rate follows.
        tokens: trained so far, without padding.
        eval_loss: of the weights after this step, if they were evaluated.
        files: bytes of every file of the checkpoint.
    """

    schema_version: int = 1
    step: NonNegativeInt
    num_steps: NonNegativeInt
    seed: NonNegativeInt
    fingerprint: str
    position: DataPosition
    recipe: Recipe
    spec: ModelSpec
    workload: Workload
    tokens: NonNegativeInt = 0
    eval_loss: float | None = None
    files: dict[str, int] = Field(default_factory=dict)


class Checkpoint:
    """A complete checkpoint on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = read_document(TrainingState, path / STATE_FILE)

    @property
    def size_bytes(self) -> int:
        return sum(self.state.files.values())

    def note_eval_loss(self, loss: float) -> None:
        """Say what an evaluation of its weights came to.

        Raises:
            DocumentError: it cannot be written; the checkpoint stays as it was.
        """
        self.state = self.state.model_copy(update={"eval_loss": loss})
        write_document(self.state, self.path / STATE_FILE)

    def require_whole(self) -> None:
        """
        Raises:
            CheckpointError: a file has gone or has another size than when it was written.
        """
        for name, size_bytes in self.state.files.items():
            path = self.path / name
            if not path.exists() or path.stat().st_size != size_bytes:
                found = f"{path.stat().st_size} bytes" if path.exists() else "missing"
                raise CheckpointError(
                    f"{path} is {found}, and was {size_bytes} bytes when the checkpoint was "
                    f"written: remove {self.path} to go on from the one before it"
                )


class Checkpoints:
    """Those of one run's folder, `checkpoint-STEP` each.

    A folder is written under a temporary name, synced, renamed, and only then marked complete; what
    lacks the mark is no checkpoint and is removed by the next run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def complete(self) -> list[Path]:
        """All that are, by step."""
        found = [
            (int(step), path)
            for path in self._folders()
            if (step := path.name.removeprefix(_PREFIX)).isdigit() and (path / COMPLETE).exists()
        ]
        return [path for _, path in sorted(found)]

    def latest(self) -> Checkpoint | None:
        """
        Raises:
            DocumentError: its state is damaged.
            CheckpointError: one of its files is.
        """
        paths = self.complete()
        if not paths:
            return None
        checkpoint = Checkpoint(paths[-1])
        checkpoint.require_whole()
        return checkpoint

    def write(self, state: TrainingState, write_tensors: Callable[[Path], None]) -> Checkpoint:
        """Write one; what was there before stays whatever happens.

        Raises:
            TwinstreamError: it cannot be written; nothing of it is left.
        """
        path = self.folder / f"{_PREFIX}{state.step}"
        partial = path.with_name(path.name + _PARTIAL)
        if (path / COMPLETE).exists():
            return Checkpoint(path)
        self._remove(partial)
        self._remove(path)
        try:
            write_tensors(partial)
            state = state.model_copy(update={"files": dict(_sizes(partial))})
            write_document(state, partial / STATE_FILE)
            sync(partial)
            partial.rename(path)
            sync(self.folder)
            write_text("", path / COMPLETE)
            sync(path)
        except OSError as error:
            self._remove(partial)
            raise CheckpointError(f"cannot write {path}: {told(error)}") from None
        except BaseException:
            self._remove(partial)
            raise
        return Checkpoint(path)

    def prune(self, keep: int) -> None:
        """Remove all but the last ones and the one of the least loss of an evaluation."""
        paths = self.complete()
        states = {path: Checkpoint(path).state for path in paths}
        losses = {path: s.eval_loss for path, s in states.items() if s.eval_loss is not None}
        best = min(losses, key=lambda path: losses[path]) if losses else None
        for path in paths[:-keep]:
            if path != best:
                with suppress(OSError):
                    (path / COMPLETE).unlink()
                self._remove(path)

    def remove_partial(self) -> None:
        """Remove what a kill left."""
        for path in self._folders():
            if not (path / COMPLETE).exists():
                self._remove(path)

    def _folders(self) -> list[Path]:
        return list(self.folder.glob(f"{_PREFIX}*")) if self.folder.is_dir() else []

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def written_names(carried: Sequence[str], *, adapters: bool) -> list[str]:
    """Of what a run carries what a checkpoint has: all, or with adapters them without the base.

    >>> written_names(["param.0", "param.lora.0", "opt.lora.0"], adapters=True)
    ['param.lora.0', 'opt.lora.0']
    """
    return [name for name in carried if not adapters or f".{ADAPTERS}" in name]


def linked_copy(source: Path, destination: Path, leave_out: Sequence[str]) -> None:
    """A folder with the files of another, at no cost where the file system has hard links.

    Raises:
        WeightsError: it cannot be written; what was there before is.
    """
    with whole_folder(destination, replaces=True) as folder, writing(destination, 0):
        folder.mkdir(parents=True)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in leave_out:
                _link(path, folder / path.name)


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
        sync(destination)


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(folder)), path.stat().st_size
