"""Run a sweep: the cells that have no row yet, then the figures of all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstream.schedule.files import only_writer
from twinstream.sweep.asked.machines import Cell
from twinstream.sweep.asked.values import SweepError
from twinstream.sweep.cell import BUG, OK, Row
from twinstream.sweep.config import AnyCell, SweepConfig
from twinstream.sweep.rows import FILE, RowFile, columns_of
from twinstream.sweep.slower import Slower, beside_the_faster, slower_with_more
from twinstream.sweep.workers import on_cores, on_ray


@dataclass(frozen=True)
class Swept:
    """A row for every combination in the order of the sweep, and how many were made now.

    `num_superseded` rows were there for the same values, but of other sources or profiles; they
    lie beside the others in `superseded.csv`. `num_mended` cells of `optimal` were slower than one
    with less, and have that one's plan now; `slower` are those that still are.
    """

    rows: tuple[dict[str, str], ...]
    num_new: int
    num_mended: int
    num_superseded: int
    file: Path
    slower: tuple[Slower, ...]


@dataclass(frozen=True)
class SweepSettings:
    """Where rows go and who makes them.

    `on_start` gets the number of cells and of rows there, `on_rows` all rows before any cell is
    planned again, `on_again` the number of those that are; each of these is an `on_row` once more.
    """

    folder: Path
    num_jobs: int = 1
    ray_address: str | None = None
    on_start: Callable[[int, int], None] = lambda num_cells, num_there: None
    on_row: Callable[[], None] = lambda: None
    on_rows: Callable[[Sequence[Mapping[str, str]]], None] = lambda rows: None
    on_again: Callable[[int], None] = lambda num_cells: None


def run_sweep(config: SweepConfig, settings: SweepSettings) -> Swept:
    """Make the rows that the folder lacks; a cell whose inputs are unchanged is not run again.

    Raises:
        TwinstreamError: the config, the folder or the cluster is not usable.
    """
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
        settings.on_rows(_rows_of(config_cells, file))
        plans = [cell for cell in config_cells if isinstance(cell, Cell)]  # of one machine each
        num_mended = _mended(plans, file, settings)
    rows = _rows_of(config_cells, file)
    slower = slower_with_more(plans, rows if plans else [])
    return Swept(tuple(rows), len(missing), num_mended, num_superseded, path, tuple(slower))


def _rows_of(cells: Sequence[AnyCell], file: RowFile) -> list[dict[str, str]]:
    """Of every cell its row.

    Values that amount to the same, "24GiB" and "24576MiB", share a row and keep their names.
    """
    by_key = {row["key"]: row for row in file.rows}
    return [
        by_key[cell.key] | {name: str(value) for name, value in cell.values.items()}
        for cell in cells
    ]


def _mended(cells: Sequence[Cell], file: RowFile, settings: SweepSettings) -> int:
    """Give cells of `optimal` the plan of a faster one with less, until none gets faster by it.

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
            raise SweepError(f"a bug in twinstream, with a cell beside another: {row['reason']}")
        if row["status"] == OK and row["tokens_per_s"] > speed[row["key"]]:
            file.replace(row)
            adopted |= {row["key"]} if row.get("plan_of") else set()
        file.note_tried(_keys(cells[row["key"]]))
        settings.on_row()
    return adopted


def _superseded(
    rows: Sequence[Mapping[str, str]], cells: Mapping[str, AnyCell], names: Sequence[str]
) -> set[str]:
    """Keys of rows whose values are a cell's of now, but not what they amount to."""
    asked = {tuple(str(cell.values[name]) for name in names) for cell in cells.values()}
    old = (row for row in rows if row["key"] not in cells)
    return {row["key"] for row in old if tuple(row[name] for name in names) in asked}


def _check_sources(row: Row, cells: Mapping[str, AnyCell]) -> None:
    if row["key"] not in cells:
        raise SweepError(
            "a process that makes rows has other sources of twinstream than this one: they changed "
            "meanwhile, or another version is installed on the cluster; run it again, and nothing "
            "that is done is lost"
        )


def _rows(missing: Sequence[AnyCell], settings: SweepSettings) -> Iterator[Row]:
    if settings.ray_address is not None:
        return on_ray(missing, settings.ray_address)
    return on_cores(missing, min(settings.num_jobs, len(missing)))
