"""A table of the terminal that never cuts a number."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

_WIDE = 10_000


class FittedTable(Table):
    """Columns that are too many for the screen stand below the others, with the first one again.

    Columns of numbers are justified right and never wrap; their heads do, where room is short.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The columns in as few tables as the screen has room for."""
        width = options.max_width if self.width is None else min(self.width, options.max_width)
        for part in self._parts(console, width):
            _keep_words_whole(console, part, width)
            yield from Table.__rich_console__(part, console, options.update(max_width=width))

    def _parts(self, console: Console, width: int) -> Iterator[Table]:
        whole = self._with([_unwrapped(column) for column in self.columns], width)
        if len(self.columns) < 2 or _least_width(console, whole) <= width:
            yield whole
            return
        first, *rest = map(_narrow, whole.columns)
        title = self.title
        while rest:
            count = len(rest)
            while count > 1 and not self._fits(console, [first, *rest[:count]], width):
                count -= 1
            part = self._with([first, *rest[:count]], width)
            part.title, title = title, None
            yield part
            rest = rest[count:]

    def _fits(self, console: Console, columns: Sequence[Column], width: int) -> bool:
        return _least_width(console, self._with(columns, width)) <= width

    def _with(self, columns: Sequence[Column], width: int) -> Table:
        part = copy(self)
        part.columns = [replace(column, _index=i) for i, column in enumerate(columns)]
        part.width = None if self.width is None else width
        return part


def _least_width(console: Console, table: Table) -> int:
    """Narrower than that, rich breaks words and drops letters."""
    return sum(least for least, _ in _widths(console, table)) + table._extra_width


def _widths(console: Console, table: Table) -> list[tuple[int, int]]:
    """Of each column with its padding: the least that keeps words whole, and the most it takes."""
    options = console.options.update(width=_WIDE)
    widths = [table._measure_column(console, options, column) for column in table.columns]
    return [
        (width.maximum if column.no_wrap else width.minimum, width.maximum)
        for column, width in zip(table.columns, widths, strict=True)
    ]


def _keep_words_whole(console: Console, table: Table, width: int) -> None:
    """Narrow the columns of most room; rich narrows the widest, and drops letters of its words."""
    least, most = map(list, zip(*_widths(console, table), strict=True))
    room, given = width - table._extra_width, list(most)
    if sum(most) <= room or sum(least) > room:
        return
    while sum(given) > room:
        spare = [wide - need for wide, need in zip(given, least, strict=True)]
        given[spare.index(max(spare))] -= 1
    for column, wide, full in zip(table.columns, given, most, strict=True):
        if wide < full:
            column.width = wide - table._get_padding_width(column._index)


def _unwrapped(column: Column) -> Column:
    return replace(column, no_wrap=True) if column.justify == "right" else column


def _narrow(column: Column) -> Column:
    head = column.header
    if not column.no_wrap or not isinstance(head, str):
        return column
    room = max(map(cell_len, [*head.split(), *map(str, column.cells)]), default=1)
    return replace(column, header="\n".join(wrap(head, room)))
