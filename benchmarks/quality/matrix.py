"""The quality matrix: how close `optimal` comes to the bound, over machines, models and caps.

OMP_NUM_THREADS=1 python -m benchmarks.quality.matrix --out FILE.csv --budget-s 3600 --cell-s 300
python -m benchmarks.quality.matrix --fill-others FILE.csv --budget-s 3600 --cell-s 600
python -m benchmarks.quality.matrix --summary FILE.csv
python -m benchmarks.quality.matrix --summary FILE.csv --against OLDER.csv --plot FILE.svg

A cell's row is appended as soon as it is there; cells that the file has already are not run again,
so that an interrupted run goes on where it stopped (take a row out to run its cell again). Any
prefix of the cells is a fair sample. `--third` (83 cells drawn once), `--jobs`, `--limit`,
`--only machine=h100` and `--others-every 4` (the other policies in every fourth cell only; 0: in
none) make less of it.
`--fill-others` compares with the other policies where that was left out: they plan the chain that
a row names, so that no cell is planned again.
"""

import argparse
import csv
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context  # noqa: TID251 - sends functions of this script
from pathlib import Path

from benchmarks.quality.matrix_cells import Cell, a_third, cells
from benchmarks.quality.matrix_plot import plot
from benchmarks.quality.matrix_row import KEY_COLUMNS, Row, columns, compare, measure
from benchmarks.quality.matrix_summary import against, summary

REPO = Path(__file__).resolve().parents[2]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, which may be older and have other columns."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def missing_cells(path: Path, wanted: Iterable[Cell]) -> list[Cell]:
    """The cells that the file has no row of; a new file gets its header."""
    if not path.exists():
        _append(path, columns())
    _check_columns(path)
    done = {_key(row) for row in read_rows(path)}
    return [cell for cell in wanted if cell.key not in done]


def _check_columns(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        header = tuple(next(csv.reader(file), ()))
    if header != columns():
        raise SystemExit(f"{path} has other columns than this version writes: give another file")


@dataclass(frozen=True)
class Effort:
    """Worker processes, and limits of time.

    Past `budget_s` no cell is begun, and those begun are finished; a cell is cut off after
    `cell_s`. The other policies plan every `others_every`-th of all cells, none if it is 0.
    """

    jobs: int = 2
    budget_s: float | None = None
    cell_s: int | None = None
    others_every: int = 1


def run(path: Path, wanted: Iterable[Cell], effort: Effort) -> None:
    """Append a row per missing cell."""
    todo, commit = missing_cells(path, wanted), _commit()
    every = effort.others_every
    with_others = set(cells()[::every]) if every else set()

    def row_of(cell: Cell) -> Callable[[], Row]:
        others = cell in with_others
        return partial(measure, cell, commit, others=others, limit_s=effort.cell_s)

    for row in _finished([row_of(cell) for cell in todo], effort):
        _append(path, row.values())


def fill_others(path: Path, effort: Effort) -> None:
    """Compare the planned cells of a file with the other policies, where that was left out."""
    _check_columns(path)
    rows, commit = read_rows(path), _commit()
    left = [row for row in rows if row["status"] == "ok" and not row["others_commit"]]
    for row in _finished([partial(compare, row, commit, effort.cell_s) for row in left], effort):
        rows = [row if _key(row) == _key(other) else other for other in rows]
        whole = path.with_suffix(".part")
        whole.unlink(missing_ok=True)
        for values in (columns(), *(other.values() for other in rows)):
            _append(whole, values)
        whole.replace(path)


def _finished(calls: Sequence[Callable[[], Row]], effort: Effort) -> Iterator[Row]:
    """What the calls return as it comes, told; as many at work as there are jobs."""
    begun, queue = time.perf_counter(), iter(calls)

    def in_time() -> Iterator[Callable[[], Row]]:
        for call in queue:
            if effort.budget_s is not None and time.perf_counter() - begun >= effort.budget_s:
                return
            yield call

    with ProcessPoolExecutor(effort.jobs, mp_context=get_context("spawn")) as pool:
        working = {pool.submit(call) for call in islice(in_time(), effort.jobs)}
        number = 0
        while working:
            done, working = wait(working, return_when=FIRST_COMPLETED)
            working |= {pool.submit(call) for call in islice(in_time(), len(done))}
            for future in done:
                number += 1
                _tell(future.result(), number, len(calls), time.perf_counter() - begun)
                yield future.result()


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY_COLUMNS)


def _append(path: Path, values: Iterable[str]) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(values)


def _tell(row: Row, number: int, total: int, seconds: float) -> None:
    cell = " ".join(_key(row))
    told = row["message"]
    if row["status"] == "ok":
        told = f"{float(row['step_s']):.3f} s, gap {float(row['gap_family']):.1%}"
    took = f"planned in {row['plan_seconds'] or '?'} s"
    print(
        f"{number}/{total} {seconds:.0f} s | {cell} | {row['status']}: {told}, {took}", flush=True
    )


def _commit() -> str:
    """The commit that is checked out, with a + where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.check_output(["git", "-C", str(REPO), *words], text=True).strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.matrix")
    parser.add_argument("--out", type=Path, help="run, and append to this CSV file")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--budget-s", type=float, help="begin no cell after so many seconds")
    parser.add_argument("--cell-s", type=int, help="cut a cell off after so many seconds")
    parser.add_argument("--third", action="store_true", help="only 83 cells, drawn once")
    parser.add_argument("--limit", type=int, help="only so many cells, from the first")
    axes = ", ".join(KEY_COLUMNS)
    parser.add_argument(
        "--only", action="append", default=[], help=f"only cells with AXIS=VALUE; axes: {axes}"
    )
    parser.add_argument(
        "--others-every", type=int, default=1, help="other policies in every Nth cell; 0: in none"
    )
    parser.add_argument("--fill-others", type=Path, help="compare the rows of this CSV file")
    parser.add_argument("--summary", type=Path, help="print Markdown of this CSV file")
    parser.add_argument("--against", type=Path, help="with --summary: compare with this older file")
    parser.add_argument("--plot", type=Path, help="write a plot of the file to this SVG")
    given = parser.parse_args(arguments)
    source = given.summary or given.fill_others or given.out
    if source is None:
        parser.error("give --out or --fill-others to run, or --summary to read a file")
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: give 1 or more")
    try:
        _do(given, source)
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"cannot read or write the file: {error}") from None


def _do(given: argparse.Namespace, source: Path) -> None:
    effort = Effort(given.jobs, given.budget_s, given.cell_s, given.others_every)
    if given.out:
        wanted = _only(a_third() if given.third else cells(), given.only)[: given.limit]
        run(given.out, wanted, effort)
    if given.fill_others:
        fill_others(given.fill_others, effort)
    if given.summary:
        print(summary(read_rows(given.summary)))
    if given.summary and given.against:
        print("\n" + against(read_rows(given.summary), read_rows(given.against)))
    if given.plot:
        given.plot.write_text(plot(read_rows(source)), encoding="utf-8")


def _only(some: Sequence[Cell], conditions: list[str]) -> list[Cell]:
    wanted = {axis: value for axis, _, value in (one.partition("=") for one in conditions)}
    if unknown := set(wanted) - set(KEY_COLUMNS):
        raise SystemExit(f"no such axis: {', '.join(sorted(unknown))}")
    return [
        cell
        for cell in some
        if wanted.items() <= dict(zip(KEY_COLUMNS, cell.key, strict=True)).items()
    ]


if __name__ == "__main__":
    main()
