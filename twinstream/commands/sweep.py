"""`sweep`: many plans at once, to compare models, machines or clusters, caps and policies."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.outputs import check_folder
from twinstream.commands.output import Stage, print_json, print_report, progress

if TYPE_CHECKING:
    from twinstream.study.sweep.sweep import Slower, Swept

_BUG = 1


Folder = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FOLDER", callback=check_folder,
        help="By default named as the config.",
    ),
]  # fmt: skip


def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to vary.")],
    output: Folder = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; by default one a core.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on the Ray cluster at this address (`auto`: this machine's; `local`: a new "
            "one here).",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Plan and predict every combination of values in a TOML file; a killed sweep continues.

    Rows go to FOLDER/rows.csv, heatmaps and budget curves to FOLDER/sweep.html and PNG files.
    """
    from twinstream.study.sweep import sweep as runner
    from twinstream.study.sweep.cells import BUG, OK
    from twinstream.study.sweep.config import load_config

    wanted = load_config(config)
    folder = output or Path(config.stem)
    num_cells, start_s = len(wanted.cells()), time.perf_counter()
    with progress(f"sweeping {config}", num_cells, quiet=as_json) as advance:
        settings = runner.SweepSettings(
            folder, jobs or os.cpu_count() or 1, ray, _advance_by(advance), advance,
            on_again=lambda number: _tell_again(number, folder, advance, quiet=as_json),
        )  # fmt: skip
        try:
            swept = runner.run_sweep(wanted, settings)
        except KeyboardInterrupt:
            kept = f"rows are kept in {folder}: the same command goes on"
            typer.echo(f"stopped; {kept}", err=True)
            raise
    seconds = time.perf_counter() - start_s
    count = dict.fromkeys((OK, "infeasible", "refused", BUG), 0)
    for row in swept.rows:
        count[row["status"]] += 1
    if as_json:
        files = {"rows": swept.file, "page": swept.page}
        about = {"seconds": seconds, "num_cells": count}
        print_json(files | _numbers(swept) | about)
    else:
        told = ", ".join(f"{number:,} {status}" for status, number in count.items() if number)
        print_report(
            f"{len(swept.rows):,} cells: {told}; {swept.num_new:,} now, in {seconds:,.1f} s.",
            f"Wrote {swept.file} and {swept.page}.",
            *_notes(swept),
        )
    _require_plans(swept, count)


def _require_plans(swept: "Swept", count: Mapping[str, int]) -> None:
    """End as a bug where a cell fell over, and with the reason where none has a plan."""
    from twinstream.study.answer import StudyError
    from twinstream.study.sweep.cells import BUG, OK

    if count[BUG]:
        typer.echo("error: some cells fell over, which is a bug in twinstream", err=True)
        raise typer.Exit(_BUG)
    if not count[OK]:
        raise StudyError(f"no cell could be planned; the first: {swept.rows[0]['reason']}")


def _numbers(swept: "Swept") -> dict[str, object]:
    """What a sweep made, and the cells that are slower than one with less, for programs."""
    slower = [
        {"cell": dict(one.cell.values), "than": dict(one.than.values), "by": one.by}
        for one in swept.slower
    ]
    return {
        "num_new": swept.num_new, "num_mended": swept.num_mended,
        "num_superseded": swept.num_superseded, "slower_with_more": slower,
    }  # fmt: skip


def _notes(swept: "Swept") -> list[str]:
    """What is not as it was meant to be."""
    from twinstream.study.sweep.rows import SUPERSEDED, errors_note, ranking_note

    found = [note for note in (errors_note(swept.rows), ranking_note(swept.rows)) if note]
    if swept.num_mended:
        found.append(
            f"{swept.num_mended:,} now with the plan of a cell with less memory or a slower link, "
            "which is faster than what was found for it alone."
        )
    if slower := swept.slower:
        found.append(_told_slower(slower))
    if swept.num_superseded:
        found.append(
            f"Moved to {swept.file.with_name(SUPERSEDED)}: {swept.num_superseded:,} rows of "
            "another twinstream or of other profiles."
        )
    return found


def _told_slower(slower: Sequence["Slower"]) -> str:
    worst = max(slower, key=lambda found: found.by)
    values, of_less = worst.cell.values, worst.than.values
    names = [name for name, value in of_less.items() if values[name] != value]
    differs = ", ".join(f"{name} {values[name]} against {of_less[name]}" for name in names)
    alike = ", ".join(f"{name} {value}" for name, value in values.items() if name not in names)
    return (
        f"{len(slower):,} {'cell is' if len(slower) == 1 else 'cells are'} slower than one with no "
        f"more memory and no faster link; the worst takes {worst.by:.1%} longer per token: "
        f"{differs} ({alike}). `plan` the one with less to a file, and the other with "
        "`--warm-start` that file."
    )


def _tell_again(number: int, folder: Path, stage: Stage, *, quiet: bool) -> None:
    from twinstream.study.sweep.sweep import PAGE

    stage.more(number)
    if quiet:
        return
    cells = "1 cell is" if number == 1 else f"{number:,} cells are"
    typer.echo(
        f"{folder / PAGE} has all cells; {cells} slower than one with less, and planned again, "
        "beside that one's plan",
        err=True,
    )


def _advance_by(advance: Callable[[], None]) -> Callable[[int, int], None]:
    def started(num_cells: int, num_there: int) -> None:
        for _ in range(num_there):
            advance()

    return started
