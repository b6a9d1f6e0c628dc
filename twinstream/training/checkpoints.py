"""The checkpoints of a run: folders that are whole, or are none."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pydantic import Field, JsonValue, NonNegativeInt

from twinstream.data.order import Position
from twinstream.executor.weights.durable_files import sync, whole_folder, writing
from twinstream.models.lowering.optimizer_tasks import state_parts
from twinstream.models.model import AnyModel
from twinstream.models.recipe import Recipe
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import (
    digests_of,
    read_bytes,
    read_document,
    read_text,
    reason_of,
    write_document,
    write_text,
)
from twinstream.schedule.node import Node
from twinstream.schedule.workload import Workload
from twinstream.training.options import OptionsError, TrainOptions, fixed_options

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
        state_parts: in how many the optimizer's state of a group lies, where that is several.
        options: those that decide the bits of the run.
        files: bytes of every file of the checkpoint.
        digests: SHA-256 of each of them; the mark of a complete checkpoint has that of this one.
    """

    schema_version: int = 1
    step: NonNegativeInt
    num_steps: NonNegativeInt
    seed: NonNegativeInt
    fingerprint: str
    position: DataPosition
    recipe: Recipe
    spec: AnyModel
    workload: Workload
    tokens: NonNegativeInt = 0
    eval_loss: float | None = None
    state_parts: dict[str, int] | None = None
    options: dict[str, JsonValue] = Field(default_factory=dict)
    files: dict[str, int] = Field(default_factory=dict)
    digests: dict[str, str] = Field(default_factory=dict)


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
        new = self.path / f"{STATE_FILE}{_PARTIAL}"
        self.state = self.state.model_copy(update={"eval_loss": loss})
        write_document(self.state, new)
        (mark,) = _digests(self.path, [new.name]).values()
        known = read_text(self.path / COMPLETE).split()
        write_text("\n".join([*known, mark, ""]), self.path / COMPLETE)  # whole before and after
        new.replace(self.path / STATE_FILE)

    def require_whole(self) -> None:
        """
        Raises:
            CheckpointError: a file has gone or is another than when it was written.
        """
        marks = read_bytes(self.path / COMPLETE).decode(errors="replace").split()
        expected = {name: [digest] for name, digest in self.state.digests.items()}
        if expected and not marks:
            raise self._damaged(self.path / COMPLETE, "has no longer the digest that it had")
        expected |= {STATE_FILE: marks} if marks else {}
        for name, size_bytes in self.state.files.items():
            path = self.path / name
            if not path.exists() or path.stat().st_size != size_bytes:
                found = f"{path.stat().st_size} bytes" if path.exists() else "missing"
                raise self._damaged(path, f"is {found}, and was {size_bytes} bytes")
        for name, digest in _digests(self.path, expected).items():
            if digest not in expected[name]:
                raise self._damaged(self.path / name, "has other bytes than")
        if self.path.name != f"{_PREFIX}{self.state.step}":
            raise self._damaged(self.path / STATE_FILE, f"is of step {self.state.step}, not as")

    def require_options(self, options: TrainOptions, source: Path) -> None:
        """
        Args:
            options: of the run's folder, as `source` has them.

        Raises:
            OptionsError: one that decides the bits is not that of the checkpoint.
        """
        now, then = fixed_options(options), self.state.options
        for name in sorted(now | then) if then else ():
            if now.get(name) != then.get(name):
                raise OptionsError(
                    f"{source} says {name} = {now.get(name)!r:.60}, and {self.path.name} was "
                    f"trained with {then.get(name)!r:.60}: it decides the bits of the run and "
                    "cannot change; put that back, or start a new run"
                )

    def require_model(self, spec: AnyModel) -> None:
        """
        Raises:
            CheckpointError: the model is another than the one that was trained.
        """
        now = spec.identity
        for name, then in self.state.spec.identity.items():
            if (found := now.get(name)) != then:
                raise CheckpointError(
                    f"the model's {name} is {found!r:.80}, and {self.path.name} was trained with "
                    f"{then!r:.80}: put its config.json, and the version of its code if that is "
                    "not ours, back, or start a new run"
                )

    def require_parts(self, spec: AnyModel) -> None:
        """
        Raises:
            CheckpointError: the optimizer's state lies otherwise than it is read now.
        """
        recipe, then = self.state.recipe, self.state.state_parts
        then = state_parts(spec, recipe, earlier=True) if then is None else then
        now = state_parts(spec, recipe)
        for group in then | now:
            if (had := then.get(group, 1)) != (has := now.get(group, 1)):
                raise CheckpointError(
                    f"{self.path} has the optimizer's state of group {group} in {had} parts, and "
                    f"this version of twinstream has it in {has}: go on with the version that "
                    "wrote it"
                )

    def _damaged(self, path: Path, how: str) -> CheckpointError:
        return CheckpointError(
            f"{path} {how} when the checkpoint was written: remove {self.path} to go on from the "
            "one before it"
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
            CheckpointError: one of its files is, or cannot be read.
        """
        paths = self.complete()
        if not paths:
            return None
        checkpoint = Checkpoint(paths[-1])
        try:
            checkpoint.require_whole()
        except OSError as error:
            raise CheckpointError(f"cannot read {checkpoint.path}: {reason_of(error)}") from None
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
        if path.exists() and not _is_ours(path):
            raise CheckpointError(
                f"{path} is there, and is no checkpoint of this run: move it elsewhere"
            )
        self._remove(path)
        try:
            write_tensors(partial)
            files = dict(_sizes(partial))
            found = {"files": files, "digests": _digests(partial, files)}
            write_document(state.model_copy(update=found), partial / STATE_FILE)
            (mark,) = _digests(partial, [STATE_FILE]).values()
            sync(partial)
            partial.rename(path)
            sync(self.folder)
            write_text(mark + "\n", path / COMPLETE)
            sync(path)
        except OSError as error:
            self._remove(partial)
            raise CheckpointError(f"cannot write {path}: {reason_of(error)}") from None
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
                    self._remove(path.rename(path.with_name(path.name + _PARTIAL)))

    def remove_partial(self) -> None:
        """Remove what a kill left; a folder that a person has put beside them stays."""
        for path in self._folders():
            name = path.name.removeprefix(_PREFIX)
            is_named_so = name.removesuffix(_PARTIAL).isdecimal()
            if not is_named_so or (path / COMPLETE).exists():
                continue
            if name.endswith(_PARTIAL) or _is_ours(path):
                self._remove(path)

    def _folders(self) -> list[Path]:
        return list(self.folder.glob(f"{_PREFIX}*")) if self.folder.is_dir() else []

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Every folder that has the name of a checkpoint has its state, even if it lacks the mark."""
    return (path / STATE_FILE).is_file()


def linked_copy(source: Path, destination: Path, leave_out: Sequence[str]) -> None:
    """A folder with the files of another, at no cost where the file system has hard links.

    Raises:
        WeightsError: it cannot be written; what was there before is.
    """
    with whole_folder(destination, replaces=True) as folder, writing(destination, 0):
        folder.mkdir(parents=True)
        for path in sorted(source.rglob("*")):
            inside = path.relative_to(source)
            if path.is_file() and inside.parts[0] not in leave_out:
                (folder / inside).parent.mkdir(exist_ok=True)
                _link(path, folder / inside)


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


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files, by name."""
    names = list(names)
    return dict(zip(names, digests_of(folder / name for name in names), strict=True))
