"""A run's frozen groups kept in files as they lie in memory: made once, read when it goes on.

Such are blocks in few bits, beside the run, and what is read from a disk and lies nowhere else.
A file for each group, and `made_of.json`, written last: the digests of the source's files, the
format, and the digest of each group. Where any of that differs, groups are made anew. Digests of a
source whose files have their stamps still are not computed again.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Self

import torch

from twinstream.executor.kernels.base_codes import quantized_group
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.weights.durable_files import make_room, write_file, writing
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.models.providers.model import Model
from twinstream.models.providers.trained import layout_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.files import digests_of, read_text, stamp_of

FOLDER = "base"  # of a run
_MADE_OF = "made_of.json"
_PART_BYTES, _THREADS = 1 << 26, 4  # of a block, hashed side by side


def in_base(spec: Model, recipe: Recipe, group: str, flat: torch.Tensor) -> torch.Tensor:
    """A group's flat parameters as the recipe keeps them: frozen blocks in few bits, if it says."""
    base = recipe.base_of(group)
    if base == "model":
        return flat
    return quantized_group(flat, spec.group_layout(group), DTYPES[spec.dtype], base)


class BaseCache:
    """A cache in a folder of frozen groups as a recipe keeps them.

    Args:
        files: of the source.
        made_of: what else groups follow from.
        sizes: of the groups that are kept.
        tell: takes a line on what is made anew.
    """

    def __init__(
        self, folder: Path, files: Iterable[Path], made_of: Mapping[str, object],
        sizes: Mapping[str, int], tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder, self._tell = folder, tell
        self._files, self._made_of, self._sizes = sorted(files), dict(made_of), dict(sizes)
        self._stamps = {file.name: stamp_of(file) for file in self._files}
        self._known = self._digests_kept()
        self._made: dict[str, str] = {}

    @classmethod
    def of_base(
        cls, run: Path, source: HfFolder, recipe: Recipe, tell: Callable[[str], None]
    ) -> Self:
        """Return that of a run's frozen base, coded as the recipe keeps it."""
        files = {file for stored in source.stored.values() for file in stored.files}
        groups = [g for g in source.spec.parameter_groups if recipe.base_of(g) != "model"]
        sizes = {g: layout_of(source.spec, recipe, g).size_bytes for g in groups}
        made_of = {"base": recipe.base, "dtype": source.spec.dtype}
        return cls(run / FOLDER, files, made_of, sizes, tell)

    def file(self, group: str) -> Path:
        """Return the file of a group."""
        return self._folder / f"{group}.bin"

    def has(self, group: str) -> bool:
        """Return whether a group's file is there, as it was made."""
        return _read(self.file(group), self._sizes[group], self._known.get(group)) is not None

    def write(self, groups: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write groups, and then what all that are there were made of.

        Raises:
            WeightsError: one cannot be written.
        """
        kept = ((g, d) for g, d in self._known.items() if g not in self._sizes or self.has(g))
        self._made = dict(kept)
        for group, flat in groups:
            self._write(group, flat)
        with writing(self._folder / _MADE_OF, 0):
            self._finish()

    def _write(self, group: str, flat: torch.Tensor) -> None:
        make_room(self._folder, self._sizes[group])
        with writing(self._folder, 0):
            (self._folder / _MADE_OF).unlink(missing_ok=True)
        write_file(self.file(group), flat.numpy().tobytes())
        self._made[group] = _digest_of(flat)

    def _digests_kept(self) -> dict[str, str]:
        """Of each block that was made of this; of none where the file says otherwise, or is
        damaged."""
        path = self._folder / _MADE_OF
        found: object = None
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(read_text(path)) if path.exists() else {}
        match found:
            case {"digests": dict(digests), "of": dict(of), "stamps": stamps, **others}:
                if others != self._made_of or of.keys() != self._stamps.keys():
                    why = "are of another base"
                elif stamps == self._stamps or of == self._source():
                    return digests
                else:
                    why = "were made of other files"
            case {} if not found:
                return {}
            case _:
                why = f"have no {_MADE_OF} that can be read"
        self._tell(f"the blocks in {self._folder} {why}: they are made anew")
        return {}

    def _source(self) -> dict[str, str]:
        """Digests of the files that blocks are made of."""
        return dict(zip(self._stamps, digests_of(self._files), strict=True))

    def of(self, group: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The flat block, 1-D uint8: from its file or, kept then, as it is made.

        Raises:
            WeightsError: a file cannot be read or written.
        """
        path, digest = self.file(group), self._known.get(group)
        flat = _read(path, self._sizes[group], digest)
        if flat is None and digest is not None:
            self._tell(f"{path} is damaged: the block is made anew")
        if flat is not None:
            self._made[group] = self._known[group]
            if len(self._made) == len(self._sizes) and not (self._folder / _MADE_OF).exists():
                with suppress(WeightsError, OSError):
                    self._finish()
            return flat
        flat = make()
        self._keep(group, flat)
        return flat

    def _keep(self, group: str, flat: torch.Tensor) -> None:
        """On the disk; `made_of.json` follows the last of them."""
        with suppress(WeightsError, OSError):  # it costs time at the next start, nothing else
            if not self._made:
                make_room(self._folder, sum(self._sizes.values()))
            self._write(group, flat)
            if len(self._made) == len(self._sizes):
                self._finish()

    def _finish(self) -> None:
        told = self._made_of | {"of": self._source(), "stamps": self._stamps}
        if all(stamp_of(file) == self._stamps[file.name] for file in self._files):
            content = json.dumps(told | {"digests": self._made})
            write_file(self._folder / _MADE_OF, content.encode())


def _read(path: Path, size_bytes: int, digest: str | None) -> torch.Tensor | None:
    """The block in a file; None where it is not the one that was written."""
    with suppress(OSError):
        if digest is not None and path.is_file() and path.stat().st_size == size_bytes:
            flat = torch.from_file(str(path), size=size_bytes, dtype=torch.uint8)
            return flat if _digest_of(flat) == digest else None
    return None


def _digest_of(flat: torch.Tensor) -> str:
    """SHA-256 of the digests of its parts."""

    content = flat.numpy().data

    def of_part(start: int) -> bytes:
        return sha256(content[start : start + _PART_BYTES]).digest()

    with ThreadPoolExecutor(_THREADS) as threads:
        parts = threads.map(of_part, range(0, flat.numel(), _PART_BYTES))
        return sha256(b"".join(parts)).hexdigest()
