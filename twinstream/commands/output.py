"""What commands print: tables or JSON on stdout, progress on stderr."""

import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from pydantic_core import to_json
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from twinstream.schedule.sizes import gib

_MAX_COLUMNS = 100
_FIRST_LINE_S, _LINES_S = 2.0, 5.0
_LINES_OF_ELAPSED = 0.05  # hours do not fill a log

Advance = Callable[[], None]


def printable(text: str) -> str:
    """The text without what a terminal would obey: names may come from anyone's files.

    >>> printable("\\x1b[31mred")
    '\ufffd[31mred'
    """
    return "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text
    )


class _Screen(Console):
    """A console whose control characters are its own."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def print_json(document: object) -> None:
    """One JSON document; what is not a finite number is null."""
    text = to_json(document, indent=2, inf_nan_mode="null").decode()
    sys.stdout.write(text + "\n")


def print_report(*parts: RenderableType) -> None:
    """Tables and lines, as wide as the terminal but at most 100 columns."""
    console = _Screen(highlight=False, markup=False)
    console.width = min(console.width, _MAX_COLUMNS) if console.is_terminal else _MAX_COLUMNS
    for part in parts:
        console.print(part)


@contextmanager
def progress(what: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Advance]:
    """What is going on while the block runs, on stderr; nothing if quiet.

    On a terminal it is a bar, elsewhere a line every few seconds.
    """
    console = _Screen(stderr=True)
    if quiet:
        yield lambda: None
        return
    if not console.is_terminal:
        with _lines(what, total) as stage:
            yield stage.advance
        return
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()]
    if total is not None:
        columns.insert(2, MofNCompleteColumn())
    # Drawing takes time from what is measured meanwhile, so it is seldom done.
    with Progress(*columns, console=console, transient=True, refresh_per_second=3) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@dataclass
class _Stage:
    """What lines tell of."""

    what: str
    total: int | None
    done: int = 0
    pinned: str = ""
    start_s: float = field(default_factory=time.monotonic)

    def advance(self) -> None:
        self.done += 1

    def told(self) -> str:
        of = "" if self.total is None else f": {self.done:,} of {self.total:,}"
        return f"{self.what}{of}{self.pinned}, {time.monotonic() - self.start_s:.0f} s"


@contextmanager
def _lines(what: str, total: int | None) -> Iterator[_Stage]:
    """A line on stderr after two seconds and then every few, while the block runs."""
    stage, over, stderr = _Stage(what, total), threading.Event(), sys.stderr

    def tell() -> None:
        wait_s = _FIRST_LINE_S
        while not over.wait(wait_s):
            with suppress(OSError, ValueError):  # nobody listens any more
                print(printable(stage.told()), file=stderr, flush=True)
            wait_s = max(_LINES_S, _LINES_OF_ELAPSED * (time.monotonic() - stage.start_s))

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield stage
    finally:
        over.set()
        teller.join()


@dataclass(frozen=True)
class RunBars:
    """Told of every step done, and how many bytes of how many of the host arena are pinned."""

    advance: Advance
    pinned: Callable[[int, int], None]


@contextmanager
def run_progress(what: str, num_steps: int, *, quiet: bool = False) -> Iterator[RunBars]:
    """As `progress`, of a run's steps and, where it is pinned, of the host arena."""
    console = _Screen(stderr=True)
    if quiet:
        yield RunBars(lambda: None, lambda done, total: None)
    elif console.is_terminal:
        with _run_bars(console, what, num_steps) as bars:
            yield bars
    else:
        with _lines(what, num_steps) as stage:

            def pinned(done_bytes: int, total_bytes: int) -> None:
                told = f", {gib(done_bytes)} of {gib(total_bytes)} of host memory pinned"
                stage.pinned = told if done_bytes < total_bytes else ""

            yield RunBars(stage.advance, pinned)


@contextmanager
def _run_bars(console: Console, what: str, num_steps: int) -> Iterator[RunBars]:
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[done]}", markup=False),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console, transient=True, refresh_per_second=3) as bar:
        steps = bar.add_task(what, total=num_steps, done=f"0/{num_steps}")
        pinning = bar.add_task("pinning host memory", total=None, visible=False, done="")

        def advance() -> None:
            bar.advance(steps)
            bar.update(steps, done=f"{round(bar.tasks[steps].completed)}/{num_steps}")

        def pinned(done_bytes: int, total_bytes: int) -> None:
            bar.update(
                pinning,
                total=total_bytes,
                completed=done_bytes,
                visible=done_bytes < total_bytes,
                done=f"{gib(done_bytes)} of {gib(total_bytes)}",
            )

        yield RunBars(advance, pinned)
