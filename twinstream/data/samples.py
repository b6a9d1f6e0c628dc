"""A person's tensors as training data: samples of named arrays, in chunks of whole samples.

A folder has `NAME.npy` of each input, samples first, and `labels.npy`; a .safetensors file has
tensors of these names. Where samples have lists of different lengths, NAME is all of them one
behind the other, and NAME.offsets says where each begins, and where the last ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.data_error import DataError, unreadable
from twinstream.data.data_record import DataRecord
from twinstream.data.options import Source
from twinstream.data.order import Position, shuffled
from twinstream.data.packing import Chunk, ChunkShape
from twinstream.data.reading.files import DataFile, combined_hash, content_hashes
from twinstream.data.spans import Ints
from twinstream.executor.weights.safetensors_header import read_header
from twinstream.models.providers.traced_parts import TracedInput
from twinstream.schedule.workload import PADDING_LABEL

Array = NDArray[Any]
LABELS, OFFSETS = "labels", ".offsets"
_TOLD = 1024  # samples that are told of where lengths of documents are asked for
_NUMPY = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2"},
    **{"I8": "i1", "U8": "u1", "BOOL": "?"},
}


@dataclass(frozen=True)
class _Part:
    """The arrays of a folder or file, of `count` samples."""

    path: Path
    arrays: Mapping[str, Array]
    count: int

    def rows(self, one: TracedInput, rows: Ints) -> Array:
        """Those samples of an input."""
        values, dtype = self.arrays[one.name], np.dtype(one.dtype)
        if (offsets := self.arrays.get(one.name + OFFSETS)) is None:
            return values[rows].astype(dtype)
        each = prod(one.shape[:-1])
        lists = (rows[:, None] * each + np.arange(each)).ravel()
        starts = offsets[lists].astype(np.int64)
        lengths = offsets[lists + 1].astype(np.int64) - starts
        found = np.full((len(lists), one.shape[-1]), one.fill, dtype)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = np.repeat(np.arange(len(lists)), lengths)
        found[at, within] = values[np.repeat(starts, lengths) + within]
        return found.reshape(len(rows), *one.shape)

    def labels(self, rows: Ints) -> NDArray[np.int32]:
        """Those of such samples, one after the other."""
        return self.arrays[LABELS][rows].reshape(-1).astype(np.int32)


@dataclass(frozen=True)
class SampleData:
    """Samples of a model that takes tensors by name.

    Attributes:
        longest: labels of a sample; each counts as a token.
        fingerprint: of the contents and of what is read of them.
        ahead: whether chunks are made in a thread beside the training.
    """

    inputs: tuple[TracedInput, ...]
    parts: tuple[_Part, ...]
    longest: int
    fingerprint: str
    ahead: bool = True
    sides = 1
    unit = "samples"
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(
        cls, sources: Sequence[Source], inputs: tuple[TracedInput, ...], labels: int, *,
        classes: int | None = None, ahead: bool = True,
    ) -> Self:  # fmt: skip
        """Find the arrays, and check their shapes and labels.

        Args:
            labels: of each sample.
            classes: labels are below that, or negative where they do not count; None is any.

        Raises:
            DataError: one is missing, broken or of another shape; or nothing can be learned.
        """
        names = [one.name for one in inputs]
        found = [_read(source, names) for source in sources]
        parts = tuple(_checked(path, arrays, inputs, labels, classes) for path, arrays, _ in found)
        if not any((part.arrays[LABELS] >= 0).any() for part in parts):
            raise DataError(f"{parts[0].path}: no label is 0 or more: there is nothing to learn")
        hashes = [content_hashes(files) for _, _, files in found]
        return cls(inputs, parts, labels, combined_hash((hashes, inputs, labels)), ahead)

    @property
    def weights(self) -> tuple[float, ...]:
        """How many times an epoch goes through each source: once."""
        return (1.0,) * len(self.parts)

    @property
    def record(self) -> DataRecord:
        """What a run that goes on finds of its data."""
        return DataRecord(fingerprint=self.fingerprint, settings="", sources=())

    @cached_property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return sum(part.count for part in self.parts)

    @property
    def epoch_tokens(self) -> int:
        """Labels of an epoch."""
        return self.num_samples * self.longest

    @property
    def text(self) -> str:
        """What there is, for a screen."""
        shown = (f"{one.name} {one.dtype} {list(one.shape)}" for one in self.inputs)
        return f"{self.num_samples:,} samples an epoch of {', '.join(shown)}"

    def lengths(self) -> Ints:
        """Labels of each of some samples."""
        return np.full(min(_TOLD, self.num_samples), self.longest, np.int64)

    def gone_on_with(self, fingerprint: str, record: DataRecord | None) -> Self:
        """The same data.

        Raises:
            DataError: a run that began with other data is to go on.
        """
        if fingerprint == self.fingerprint:
            return self
        raise DataError(
            f"the data is not that of the checkpoint (fingerprint {self.fingerprint[:12]}, then "
            f"{fingerprint[:12]}): a file or an input changed; give what there was, or start a new "
            "run"
        )

    def require_unread(self, chunk_tokens: int, seed: int, start: Position) -> None:
        """Nothing of it may change."""

    def empty_chunk(self, shape: ChunkShape) -> Chunk:
        """Return a chunk that only fills up a pass."""
        return self._chunk(np.empty(0, np.int64), shape.chunk_tokens)

    def chunks(
        self, *, chunk_tokens: int, most_documents: int, seed: int,
        start: Position = Position(), alone: bool = False,  # noqa: B008 - frozen
    ) -> ChunkStream:  # fmt: skip
        """Chunks without end: each epoch all samples in another order, the last chunk filled up.

        Raises:
            DataError: the position is of other data or arguments.
        """
        name = combined_hash((self.fingerprint, seed, chunk_tokens))[:16]
        if start.order not in ("", name):
            raise DataError(
                f"the position is of another order of the data ({start.order}, not {name}): go on "
                "with the same data, seed and chunk tokens, or start anew"
            )
        return ChunkStream(self._from(start, chunk_tokens, seed, name), start, ahead=self.ahead)

    def _from(
        self, start: Position, chunk_tokens: int, seed: int, name: str
    ) -> Iterator[tuple[Chunk, Position]]:
        each, epoch, number = chunk_tokens // self.longest, start.epoch, start.chunk
        while True:
            order = shuffled(self.num_samples, "samples", seed, epoch)
            count = -(-len(order) // each)
            for at in range(number, count):
                is_last = at + 1 == count
                after = Position(epoch + is_last, 0, 0 if is_last else at + 1, name)
                yield self._chunk(order[at * each : (at + 1) * each], chunk_tokens), after
            epoch, number = epoch + 1, 0

    def _chunk(self, chosen: Ints, chunk_tokens: int) -> Chunk:
        """Of these samples; what is left of the chunk is filled up."""
        each = chunk_tokens // self.longest
        labels = np.full(chunk_tokens, PADDING_LABEL, np.int32)
        samples = {
            one.name: np.full((each, *one.shape), one.fill, np.dtype(one.dtype))
            for one in self.inputs
        }
        first = 0
        for part in self.parts:
            own = np.flatnonzero((chosen >= first) & (chosen < first + part.count))
            rows = chosen[own] - first
            for one in self.inputs:
                samples[one.name][own] = part.rows(one, rows)
            labels.reshape(each, self.longest)[own] = part.labels(rows).reshape(-1, self.longest)
            first += part.count
        padding = chunk_tokens - len(chosen) * self.longest
        ids = np.zeros(chunk_tokens, np.int32)
        return Chunk(ids, labels, (self.longest,) * each, padding, samples=samples)


def _read(source: Source, names: Sequence[str]) -> tuple[Path, dict[str, Array], list[DataFile]]:
    """The arrays of a source that have these names, labels among them, in memory as far as they are
    asked for; and its files."""
    path, wanted = source.path, [*names, LABELS]
    if source.weight != 1:
        raise DataError(f"{path}: samples have no weight; leave out ={source.weight:g}")
    wanted += [name + OFFSETS for name in names]
    try:
        if path.is_dir():
            files = [path / f"{name}.npy" for name in wanted if (path / f"{name}.npy").exists()]
            found = {file.stem: np.load(file, mmap_mode="r") for file in files}
        else:
            files, found = [path], _of_safetensors(path, wanted)
        sizes = [(file, file.stat()) for file in files]
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise DataError(f"{path}: an array cannot be read: {error}") from None
    told = [DataFile(file, "bin", stat.st_size, stat.st_mtime_ns) for file, stat in sizes]
    if missing := [name for name in wanted[: len(names) + 1] if name not in found]:
        kind = f"{missing[0]}.npy" if path.is_dir() else f"a tensor '{missing[0]}'"
        raise DataError(f"{path} has no {kind}: it needs {', '.join(wanted[: len(names) + 1])}")
    return path, found, told


def _of_safetensors(path: Path, wanted: Sequence[str]) -> dict[str, Array]:
    header = read_header(path)
    found: dict[str, Array] = {}
    for name in wanted:
        if (stored := header.get(name)) is None:
            continue
        if stored.dtype not in _NUMPY:
            raise DataError(f"{path}: '{name}' is {stored.dtype}: give one of {', '.join(_NUMPY)}")
        dtype = np.dtype(_NUMPY[stored.dtype])
        found[name] = np.memmap(path, dtype, "r", stored.start_bytes, stored.shape or (1,))
    return found


def _checked(
    path: Path, arrays: Mapping[str, Array], inputs: Sequence[TracedInput], labels: int,
    classes: int | None,
) -> _Part:  # fmt: skip
    """The arrays as one of as many samples as there are labels."""
    given = arrays[LABELS]
    count = len(given) if given.ndim else 0
    if given.dtype.kind not in "iu" or not count or given.size != count * labels:
        raise DataError(
            f"{path}: labels are {given.dtype} {list(given.shape)}; a sample has {labels:,}, whole "
            "numbers, negative where they do not count"
        )
    if classes is not None and int(given.max()) >= classes:
        raise DataError(
            f"{path}: a label is {int(given.max()):,}, and the model has {classes:,} classes, from "
            "0 on"
        )
    for one in inputs:
        values, offsets = arrays[one.name], arrays.get(one.name + OFFSETS)
        if not np.can_cast(values.dtype, np.dtype(one.dtype), "safe"):
            raise DataError(
                f"{path}: '{one.name}' is {values.dtype}, and the model takes {one.dtype}: convert "
                "it, or let the model take what there is"
            )
        if offsets is not None:
            _check_lists(path, one, values, offsets, count)
        elif values.shape != (count, *one.shape):
            raise DataError(
                f"{path}: '{one.name}' is {list(values.shape)}: of {count:,} samples, as many as "
                f"labels, the model takes {[count, *one.shape]}"
            )
    return _Part(path, arrays, count)


def _check_lists(path: Path, one: TracedInput, values: Array, offsets: Array, count: int) -> None:
    """Lists of a sample's numbers, each as long as the last axis at most."""
    lists = count * prod(one.shape[:-1])
    lengths = np.diff(offsets.astype(np.int64)) if offsets.ndim == 1 else np.empty(0, np.int64)
    if values.ndim != 1 or len(lengths) != lists or (offsets[0], offsets[-1]) != (0, len(values)):
        raise DataError(
            f"{path}: '{one.name}{OFFSETS}' is {list(offsets.shape)}, and '{one.name}' "
            f"{list(values.shape)}: {count:,} samples have {lists:,} lists, with {lists + 1:,} "
            "offsets from 0 to as many numbers as there are"
        )
    if lists and not 0 <= int(lengths.min()) <= int(lengths.max()) <= one.shape[-1]:
        raise DataError(
            f"{path}: lists of '{one.name}' have {int(lengths.min()):,} to {int(lengths.max()):,} "
            f"numbers, and the model takes 0 to {one.shape[-1]:,}"
        )
