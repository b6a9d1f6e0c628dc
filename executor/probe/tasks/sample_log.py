"""Samples of a probe as they come: equal work is measured once, and each is kept in a file."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from twinstream.executor.probe.timing.device_timing import Timing
from twinstream.executor.run.device_state import DeviceState
from twinstream.schedule.cost import Work
from twinstream.schedule.files import write_text
from twinstream.schedule.node import Node

_DIGITS = 24  # of a digest
_NodeT = TypeVar("_NodeT", bound=Node)


class _Head(Node):
    """What measured the samples below, and how."""

    kind: Literal["samples"] = "samples"
    source: str


class _Line(Node):
    """One sample, by what it is of, and a digest of both."""

    key: str
    name: str
    time_ns: float
    state: DeviceState | None = None
    digest: str = ""

    def with_digest(self) -> "_Line":
        plain = self.model_copy(update={"digest": ""}).model_dump_json()
        found = hashlib.sha256(plain.encode()).hexdigest()[:_DIGITS]
        return self.model_copy(update={"digest": found})


class SampleLog:
    """Timings by kernel and work. A probe that was cut leaves its own in the file, a line each, and
    the next one from the same source begins with them. What is no such line is left out.

    Equal work is the same kernel with the same units, shapes, FLOPs and bytes, in whatever chain.
    """

    def __init__(self, path: Path | None = None, source: str = "") -> None:
        """`source` says what measured, and how; a file of another one is begun anew."""
        self._path = path
        self._known: dict[str, Timing] = {}
        self._taken: set[str] = set()
        self._lines: list[Node] = [_Head(source=source)]
        for line in _lines(path, source) if path is not None else ():
            self._known[line.key] = Timing(line.time_ns, line.state)
            self._lines.append(line)

    def knows(self, kernel: str, works: Sequence[Work]) -> bool:
        """Return whether this probe, or one that was cut off, has timed this work already."""
        return _key(kernel, works) in self._known

    def take(
        self, name: str, kernel: str, works: Sequence[Work], measure: Callable[[], Timing]
    ) -> Timing | None:
        """The timing of some work, measured where it is not known; None of what was taken before.

        Args:
            name: of the sample, for who reads the file.
            kernel: that does the work.
            works: that it amounts to.
            measure: times it.
        """
        key = _key(kernel, works)
        if key in self._taken:
            return None
        self._taken.add(key)
        if key not in self._known:
            timing = self._known[key] = measure()
            self._lines.append(
                _Line(key=key, name=name, time_ns=timing.time_ns, state=timing.state).with_digest()
            )
            if self._path is not None:
                text = "".join(f"{line.model_dump_json()}\n" for line in self._lines)
                write_text(text, self._path)
        return self._known[key]


def count_samples(path: Path) -> int:
    """Return the number of samples in the file of a probe that was cut off."""
    return len(_lines(path))


def _lines(path: Path, source: str | None = None) -> list[_Line]:
    """None where the file is of another source, or is no such file."""
    if not path.exists():
        return []
    first, *others = path.read_text("utf-8", "replace").split("\n")
    head = _read(_Head, first)
    if head is None or source not in (None, head.source):
        return []
    lines = [line for text in others if (line := _read(_Line, text)) is not None]
    return [line for line in lines if line == line.with_digest()]


def _read(kind: type[_NodeT], text: str) -> _NodeT | None:
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None


def _key(kernel: str, works: Sequence[Work]) -> str:
    text = "\n".join([kernel, *(work.model_dump_json() for work in works)])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
