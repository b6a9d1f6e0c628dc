"""What commands print: tables or JSON on stdout, progress on stderr."""

import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from pydantic_core import to_json
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from twinstream.schedule.sizes import gib

_MAX_COLUMNS = 100
_FIRST_LINE_S, _LINES_S = 2.0, 5.0
_LINES_OF_ELAPSED = 0.05  # hours do not fill a log


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


@contextmanager
def told_at_the_end(
    document: Callable[[], object], *, as_json: bool, screen: Callable[[], Iterable[RenderableType]]
) -> Iterator[None]:
    """Print what was found when the block ends, and when it fails: on a full disk too."""
    try:
        yield
    finally:
        if as_json:
            print_json(document())
        else:
            print_report(*screen())


def screen() -> Console:
    """Standard output, as wide as the terminal but at most 100 columns."""
    console = _Screen(highlight=False, markup=False)
    console.width = min(console.width, _MAX_COLUMNS) if console.is_terminal else _MAX_COLUMNS
    return console


def print_report(*parts: RenderableType) -> None:
    """Tables and lines, each below the other; in a pipe without blanks at their ends."""
    console = screen()
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as written:
        for part in parts:
            console.print(part)
    console.file.write("".join(f"{line.rstrip()}\n" for line in written.get().splitlines()))


class Stage:
    """What is going on; called, it is one step further."""

    def __init__(self, what: str, total: int | None, shown: Callable[[], None]) -> None:
        self._what, self._total, self._shown = what, total, shown
        self._done, self._pinned, self._start_s = 0, "", time.monotonic()
        self._doing = ""

    def __call__(self) -> None:
        self._done += 1
        self._shown()

    def more(self, number: int) -> None:
        """There are so many steps more than was said."""
        if self._total is not None:
            self._total += number
        self._shown()

    def doing(self, text: str) -> None:
        """Tell what it is at, and what it has found so far."""
        self._doing = f": {text}"
        self._shown()

    def pinned(self, done_bytes: int, total_bytes: int) -> None:
        """Tell how many bytes of how many of the host arena are pinned, until all are."""
        told = f", {gib(done_bytes)} of {gib(total_bytes)} of host memory pinned"
        self._pinned = told if done_bytes < total_bytes else ""
        self._shown()

    @property
    def told(self) -> str:
        of = "" if self._total is None else f": {self._done:,} of {self._total:,}"
        return f"{self._what}{of}{self._doing}{self._pinned}"

    @property
    def share(self) -> float:
        return self._done / self._total if self._total else 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s


@contextmanager
def progress(what: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Stage]:
    """What is going on while the block runs, on stderr; nothing if quiet.

    On a terminal it is a bar, elsewhere a line every few seconds.
    """
    console = _Screen(stderr=True)
    if quiet:
        yield Stage(what, total, lambda: None)
        return
    if not console.is_terminal:
        with _lines(Stage(what, total, lambda: None)) as stage:
            yield stage
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    # Drawing takes time from what is measured meanwhile, so it is seldom done.
    with Progress(*columns, console=console, transient=True, refresh_per_second=3) as bar:
        task = bar.add_task(what, total=None if total is None else 1.0)
        stage = Stage(what, total, lambda: bar.update(task, description=stage.told,
                                                      completed=stage.share))  # fmt: skip
        bar.update(task, description=stage.told)
        yield stage


@contextmanager
def filled_in(
    what: str, total: int, *, quiet: bool = False
) -> Iterator[Callable[[RenderableType], object]]:
    """What shows an answer, on stderr, each time that it got better, `total` times in all.

    On a terminal it stands below a count; where that is too low for it, or elsewhere, there is the
    count alone.
    """
    console, done = _Screen(stderr=True), 0
    if quiet or not console.is_terminal:
        with progress(what, total, quiet=quiet) as stage:
            yield lambda _: stage()
        return
    begun = Text(f"{what}: 0 of {total}")
    with Live(begun, console=console, transient=True, refresh_per_second=3) as live:

        def show(answer: RenderableType) -> None:
            nonlocal done
            done += 1
            line = Text(f"{what}: {done} of {total}")
            lines = len(console.render_lines(answer, pad=False))
            live.update(Group(line, answer) if lines + 2 < console.height else line)

        yield show


@contextmanager
def _lines(stage: Stage) -> Iterator[Stage]:
    """A line on stderr after two seconds and then every few, while the block runs."""
    over, stderr = threading.Event(), sys.stderr

    def tell() -> None:
        wait_s = _FIRST_LINE_S
        while not over.wait(wait_s):
            with suppress(OSError, ValueError):  # nobody listens any more
                line = f"{printable(stage.told)}, {stage.elapsed_s:.0f} s"
                print(line, file=stderr, flush=True)
            wait_s = max(_LINES_S, _LINES_OF_ELAPSED * stage.elapsed_s)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield stage
    finally:
        over.set()
        teller.join()
