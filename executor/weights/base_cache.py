"""A run's frozen blocks in few bits, kept beside the run: made once, read when it goes on.

A file for each block, as it lies in memory, and `made_of.json`, written last: the source's files
with their sizes and times, and the format. Where any of that differs, blocks are made anew.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from twinstream.executor.weights.durable_files import make_room, write_file
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.models.recipe import Recipe
from twinstream.models.trained import layout_of
from twinstream.schedule.files import read_text

FOLDER = "base"  # of a run
_MADE_OF = "made_of.json"


class BaseCache:
    """Of a source's blocks as a recipe keeps them."""

    def __init__(self, run: Path, source: HfFolder, recipe: Recipe) -> None:
        self._folder = run / FOLDER
        files = sorted({file for stored in source.stored.values() for file in stored.files})
        told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        self._made_of = json.dumps({"base": recipe.base, "dtype": source.spec.dtype, "of": told})
        groups = [g for g in source.spec.parameter_groups if recipe.base_of(g) != "model"]
        self._sizes = {g: layout_of(source.spec, recipe, g).size_bytes for g in groups}
        self._left = set(groups)
        found = ""
        with suppress(OSError, UnicodeDecodeError):
            found = read_text(self._folder / _MADE_OF)
        self._is_whole = found == self._made_of

    def of(self, group: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The flat block, 1-D uint8: from its file or, kept then, as it is made.

        Raises:
            WeightsError: a file cannot be read or written.
        """
        path = self._folder / f"{group}.bin"
        if self._is_whole:
            with suppress(OSError):
                if path.stat().st_size == self._sizes[group]:
                    return torch.from_file(str(path), size=self._sizes[group], dtype=torch.uint8)
        flat = make()
        if not self._is_whole:
            self._keep(group, path, flat)
        return flat

    def _keep(self, group: str, path: Path, flat: torch.Tensor) -> None:
        with suppress(WeightsError):  # a full disk costs time at the next start, nothing else
            if len(self._left) == len(self._sizes):
                (self._folder / _MADE_OF).unlink(missing_ok=True)
                make_room(self._folder, sum(self._sizes.values()))
            write_file(path, flat.numpy().tobytes())
            self._left.discard(group)
            if not self._left:
                write_file(self._folder / _MADE_OF, self._made_of.encode())
