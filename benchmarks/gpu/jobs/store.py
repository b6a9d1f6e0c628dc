"""The folder of a campaign: results written as they come, few files, small ones.

| file | what |
|---|---|
| results.json | all outcomes |
| profile.toml | the probed machine |
| samples.jsonl | what a probe that was cut had measured |
| timelines.json.gz | one pass of every cell, compact |
| table.md, table.json | what the results come to |
| log.txt | what went wrong, with tracebacks |
"""

import fcntl
import gzip
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.gpu.jobs.campaign import PROBE, Size
from benchmarks.gpu.jobs.results import Outcome, Results, Where
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, read_document, write_bytes, write_document

MAX_LOG_BYTES = 2 * 2**20
MAX_TIMELINES_BYTES = 12 * 2**20
_ASIDE = "set-aside"
_FOUND = (
    "results.json", "profile.toml", "samples.jsonl", "timelines.json.gz", "log.txt", "table.md",
    "table.json", "smoke.txt", "tests.txt",
)  # fmt: skip


class CampaignError(TwinstreamError):
    """A campaign's folder cannot be used."""


class Store:
    """Results of one device in a folder; every change is on the disk before a call returns."""

    def __init__(
        self, folder: Path, where: Where, size: Size, *, begins_anew: bool = False
    ) -> None:
        """What is there of another device or size is refused, or with `begins_anew` set aside."""
        self.folder = folder
        self._begins_anew = begins_anew
        self.warnings: list[str] = []
        for left in folder.glob("*.partial"):  # by a call that was killed; few files come back
            left.unlink()
        self.results = self._continued(where, size)

    @property
    def profile(self) -> Path:
        return self.folder / "profile.toml"

    @property
    def samples(self) -> Path:
        return self.folder / "samples.jsonl"

    def put(self, key: str, outcome: Outcome) -> None:
        self.results = self.results.with_outcome(key, outcome)
        write_document(self.results, self.folder / "results.json")

    def forget(self, text: str) -> None:
        """Drop the outcomes of jobs that have this text in their name."""
        if text in PROBE:
            self.samples.unlink(missing_ok=True)
        kept = {key: found for key, found in self.results.outcomes.items() if text not in key}
        self.results = self.results.model_copy(update={"outcomes": kept})

    def log(self, text: str) -> None:
        """Append to the log, whose size is bounded."""
        path = self.folder / "log.txt"
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(text.rstrip() + "\n")

    def add_timelines(self, found: Mapping[str, object]) -> None:
        """Add timelines by name; those that would make the file too large are left out."""
        path = self.folder / "timelines.json.gz"
        packed = _packed({**self._timelines(path), **found})
        if len(packed) > MAX_TIMELINES_BYTES:
            self.log(
                f"timelines of {', '.join(found)} are left out: {path.name} would be too large"
            )
            return
        write_bytes(packed, path)

    def _timelines(self, path: Path) -> dict[str, object]:
        if not path.exists():
            return {}
        try:
            document = json.loads(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, ValueError) as error:
            self._set_aside(path, str(error))
            return {}
        return document if isinstance(document, dict) else {}

    def _continued(self, where: Where, size: Size) -> Results:
        path = self.folder / "results.json"
        if not path.exists():
            return Results(where=where, size=size)
        try:
            found = read_document(Results, path)
        except DocumentError as error:
            self._set_aside(path, str(error))
            return Results(where=where, size=size)
        before, now = (found.where.backend, found.where.device, found.size), (
            where.backend, where.device, size,
        )  # fmt: skip
        if before == now:
            return found
        told = f"{path} has results of {' '.join(before)}, and this is {' '.join(now)}"
        if not self._begins_anew:
            raise CampaignError(f"{told}; give another --out")
        aside = self._put_aside()
        self.warnings.append(f"{told}: they are kept in {aside.name}, and all is begun anew")
        return Results(where=where, size=size)

    def _put_aside(self) -> Path:
        """Move what was found to a folder of its own, none that is there already."""
        numbers = (self.folder / f"{_ASIDE}-{number}" for number in count(1))
        aside = next(folder for folder in numbers if not folder.exists())
        aside.mkdir()
        for path in [path for path in self.folder.iterdir() if path.name in _FOUND]:
            path.replace(aside / path.name)
        return aside

    def _set_aside(self, path: Path, problem: str) -> None:
        damaged = path.with_name(path.name + ".damaged")
        for earlier in self.folder.glob("*.damaged"):
            earlier.unlink()
        path.replace(damaged)
        self.warnings.append(f"{problem}; kept as {damaged.name}, and begun again")


@contextmanager
def only_campaign(folder: Path) -> Iterator[None]:
    """Make the folder and hold it against a second campaign.

    Raises:
        CampaignError: it cannot be written, or a campaign is running there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CampaignError(f"cannot write into {folder}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CampaignError(f"another campaign is writing into {folder}; wait for it") from None
        yield
    finally:
        os.close(held)


def read_results(folder: Path) -> Results:
    """The results in a folder.

    Raises:
        DocumentError: there are none.
    """
    return read_document(Results, folder / "results.json")


def _packed(document: Mapping[str, object]) -> bytes:
    text = json.dumps(document, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0)
