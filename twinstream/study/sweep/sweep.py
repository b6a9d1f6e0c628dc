"""Run a sweep: the cells that have no row yet, then the figures of all."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path

from twinstream.schedule.files import only_writer, write_text
from twinstream.schedule.node import records_html
from twinstream.study.answer import StudyError
from twinstream.study.sweep.cells import BUG, OK, Cell, Row, on_cores, on_ray
from twinstream.study.sweep.config import SweepConfig
from twinstream.study.sweep.grids import number
from twinstream.study.sweep.rows import FILE, RowFile, columns_of
from twinstream.study.values import RESOURCES

PAGE = "sweep.html"
_WORTH_TELLING = 1.001
_CUT = ("rounds_per_step", "chunks_per_round", "planned_chunk_tokens")


@dataclass(frozen=True)
class Slower:
    """A cell, the fastest of those with no more, and its extra time per token: 0.02 is 2 %.

    `planned_for` is the cell that the plan of the faster one was made for, mostly that one itself.
    """

    cell: Cell
    than: Cell
    by: float
    planned_for: Cell


@dataclass(frozen=True)
class _Planned:
    cell: Cell
    resources: tuple[float, ...]
    tokens_per_s: float
    planned_for: Cell

    def has_all_of(self, other: "_Planned") -> bool:
        return all(
            mine >= theirs for mine, theirs in zip(self.resources, other.resources, strict=True)
        )


@dataclass(frozen=True)
class Swept:
    """A row for every combination in the order of the sweep, and how many were made now.

    `num_superseded` rows were there for the same values, but of other sources or profiles; they
    lie beside the others in `superseded.csv`. `num_mended` cells whose plans are searched were
    slower than one with less, and have that one's plan now; `slower` are those that still are.
    """

    rows: tuple[dict[str, str], ...]
    num_new: int
    num_mended: int
    num_superseded: int
    file: Path
    page: Path
    slower: tuple[Slower, ...]

    def records(self) -> list[dict[str, object]]:
        """A row for each cell."""
        return [dict(row) for row in self.rows]

    def _repr_html_(self) -> str:
        rows = self.records()
        same = {name for name in rows[0] if len({str(row[name]) for row in rows}) == 1}
        varied = [{name: v for name, v in row.items() if name not in same} for row in rows]
        return records_html(f"{len(rows):,} cells of {self.file}, what differs", varied)


@dataclass(frozen=True)
class SweepSettings:
    """Where rows go and who makes them.

    `on_start` gets the number of cells and of rows there; `on_again` the number of those that are
    planned again, once the page has all; each of these is an `on_row` once more.
    """

    folder: Path
    num_jobs: int = 1
    ray_address: str | None = None
    on_start: Callable[[int, int], None] = lambda num_cells, num_there: None
    on_row: Callable[[], None] = lambda: None
    on_again: Callable[[int], None] = lambda num_cells: None


def run_sweep(config: SweepConfig, settings: SweepSettings) -> Swept:
    """Make the rows that the folder lacks, and a page; what is there is not run again.

    Raises:
        TwinstreamError: the config, the folder or the cluster is not usable.
    """
    from twinstream.study.sweep.pages import sweep_html  # plotly takes long to import

    config_cells = config.cells()
    cells = {cell.key: cell for cell in config_cells}
    path = settings.folder / FILE
    with only_writer(settings.folder):
        file = RowFile(path, columns_of(config.names))
        num_superseded = file.set_aside(_superseded(file.rows, cells, config.names))
        there = {row["key"] for row in file.rows}
        missing = [cell for key, cell in cells.items() if key not in there]
        settings.on_start(len(cells), len(cells) - len(missing))
        if missing:
            for row in _rows(missing, settings):
                _check_sources(row, cells)
                file.append(row)
                settings.on_row()
        page = settings.folder / PAGE
        write_text(sweep_html(config, _rows_of(config_cells, file)), page)
        num_mended = _mended(config_cells, file, settings)
    rows = _rows_of(config_cells, file)
    slower = slower_with_more(config_cells, rows)
    if num_mended:
        write_text(sweep_html(config, rows), page)
    return Swept(tuple(rows), len(missing), num_mended, num_superseded, path, page, tuple(slower))


def _rows_of(cells: Sequence[Cell], file: RowFile) -> list[dict[str, str]]:
    """Of every cell its row.

    Values that amount to the same, "24GiB" and "24576MiB", share a row and keep their names.
    """
    by_key = {row["key"]: row for row in file.rows}
    return [
        by_key[cell.key] | {name: str(value) for name, value in cell.values.items()}
        for cell in cells
    ]


def _mended(cells: Sequence[Cell], file: RowFile, settings: SweepSettings) -> int:
    """Give cells the plan of a faster one with less, until none gets faster by it.

    Returns:
        How many have another's plan now that had not.
    """
    mended: set[str] = set()
    while True:
        slower = slower_with_more(cells, _rows_of(cells, file))
        again = [cell for cell in beside_the_faster(slower) if _keys(cell) not in file.tried]
        if not again:
            return len(mended)
        settings.on_again(len(again))
        mended |= _replaced(again, file, settings)


def _keys(cell: Cell) -> tuple[str, ...]:
    return (cell.key,) if cell.beside is None else (cell.key, cell.beside.key)


def _replaced(again: list[Cell], file: RowFile, settings: SweepSettings) -> set[str]:
    """Plan cells beside others, and keep what is faster; keys of those that have another's plan."""
    cells = {cell.key: cell for cell in again}
    speed = {r["key"]: float(r["tokens_per_s"]) for r in file.rows if r["key"] in cells}
    adopted = set()
    for row in _rows(again, settings):
        _check_sources(row, cells)
        if row["status"] == BUG:
            raise StudyError(f"a bug in twinstream, with a cell beside another: {row['reason']}")
        if row["status"] == OK and row["tokens_per_s"] > speed[row["key"]]:
            file.replace(row)
            adopted |= {row["key"]} if row.get("plan_of") else set()
        file.note_tried(_keys(cells[row["key"]]))
        settings.on_row()
    return adopted


def _superseded(
    rows: Sequence[Mapping[str, str]], cells: Mapping[str, Cell], names: Sequence[str]
) -> set[str]:
    """Keys of rows whose values are a cell's of now, but not what they amount to."""
    asked = {tuple(str(cell.values[name]) for name in names) for cell in cells.values()}
    old = (row for row in rows if row["key"] not in cells)
    return {row["key"] for row in old if tuple(row[name] for name in names) in asked}


def _check_sources(row: Row, cells: Mapping[str, Cell]) -> None:
    if row["key"] not in cells:
        raise StudyError(
            "a process that makes rows has other sources of twinstream than this one: they changed "
            "meanwhile, or another version is installed on the cluster; run it again, and nothing "
            "that is done is lost"
        )


def _rows(missing: Sequence[Cell], settings: SweepSettings) -> Iterator[Row]:
    if settings.ray_address is not None:
        return on_ray(missing, settings.ray_address)
    return on_cores(missing, min(settings.num_jobs, len(missing)))


def slower_with_more(cells: Sequence[Cell], rows: Sequence[Mapping[str, str]]) -> list[Slower]:
    """Every cell that is slower than one with less by over 0.1 %, with the fastest such one.

    Less is no more memory and no faster link. Each cell is planned by itself at first, and a plan
    lies above its bound by some percent. Cells with other tokens per step are not compared: where
    these are open, they depend on the caps.

    Args:
        cells: of a sweep.
        rows: of the cells, in the same order.
    """
    alike: dict[object, list[_Planned]] = {}
    by_key = {cell.key: cell for cell in cells}
    for cell, row in zip(cells, rows, strict=True):
        if row["status"] == OK:
            speed, planned_for = float(row["tokens_per_s"]), by_key.get(row["plan_of"], cell)
            planned = _Planned(cell, _resources(cell), speed, planned_for)
            tokens_per_step = prod(int(row[name]) for name in _CUT if name in row)
            alike.setdefault((tokens_per_step, *_all_else(cell)), []).append(planned)
    found = (_slower(one, group) for group in map(_fastest_first, alike.values()) for one in group)
    return [one for one in found if one is not None]


def beside_the_faster(slower: Iterable[Slower]) -> list[Cell]:
    """The cells to plan again, each beside the plan of the faster one; each once.

    Policies with fixed rules are left out: what comes of these is what their rows are to show.
    """
    mine = {one.cell.key: one for one in slower if one.cell.query.is_searched}
    return [replace(one.cell, beside=one.planned_for) for one in mine.values()]


def _fastest_first(group: Sequence[_Planned]) -> list[_Planned]:
    return sorted(group, key=lambda one: -one.tokens_per_s)


def _slower(one: _Planned, fastest_first: Sequence[_Planned]) -> Slower | None:
    for other in fastest_first:
        if other.tokens_per_s <= _WORTH_TELLING * one.tokens_per_s:
            break
        if one.has_all_of(other):
            by = other.tokens_per_s / one.tokens_per_s - 1
            return Slower(one.cell, other.cell, by, other.planned_for)
    return None


def _resources(cell: Cell) -> tuple[float, ...]:
    """Of which more should never be slower; what no axis varies is the same for all."""
    return tuple(
        number(name, cell.values[name]) if name in cell.values else inf
        for name in RESOURCES[cell.query.kind]
    )


def _all_else(cell: Cell) -> tuple[object, ...]:
    """What the cells that are compared have in common."""
    varied = RESOURCES[cell.query.kind]
    return tuple((name, value) for name, value in cell.values.items() if name not in varied)
