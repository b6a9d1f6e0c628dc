"""`validate`: how far predictions are from speeds that someone measured."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.outputs import check_output, output_option
from twinstream.commands.output import print_json, print_report, progress
from twinstream.fidelity.clusters import report as of_clusters
from twinstream.fidelity.clusters.measured_steps import read_measured_steps
from twinstream.fidelity.clusters.predicting import RowPredictors
from twinstream.fidelity.clusters.scoring import score
from twinstream.fidelity.report import rows_csv, validation_screen
from twinstream.fidelity.rows import rows_that
from twinstream.fidelity.validation import Validation
from twinstream.fidelity.validation import validate as validated
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import read_measured
from twinstream.schedule.files import write_text

Machines = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Profile of a machine of the table, by name or TOML file; may be given again for "
        "another.",
    ),
]
ClusterTable = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Instead: a published table of steps of clusters, predicted with the shipped "
        "profiles.",
    ),
]
MoreTables = Annotated[
    list[Path] | None, typer.Argument(metavar="[FILE...]", help="With --cluster: more such tables.")
]


def validate(  # noqa: PLR0913
    tables: MoreTables = None,
    machine: Machines = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV of configurations and tokens/s.")
    ] = None,
    cluster: ClusterTable = None,
    only: options.OnlyRows = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; by default one a core.")
    ] = None,
    output: Annotated[
        Path | None, output_option("Write measured and predicted speeds here, as CSV.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a scatter plot here.", callback=check_output),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict every row of a table of measured speeds, and say how far off that is.

    The runs of --measured were planned by the policy that their column says, ml_dataflow where
    there is none; those of --cluster are training steps on many GPUs, laid out as their table says.
    """
    if cluster is not None:
        if machine or measured or only or html:
            raise CalibrationError("--cluster goes with --jobs, -o and --json alone")
        from twinstream.commands.runs.validate import validate_clusters

        validate_clusters([cluster, *(tables or [])], jobs, output, as_json=as_json)
        return
    if not machine or measured is None or tables:
        raise CalibrationError(
            "give --machine NAME and --measured TABLE.csv, or --cluster TABLE.csv [TABLE.csv ...]"
        )
    rows = rows_that(read_measured(measured), only or [])
    profiles = [load_machine(name) for name in machine]
    with ExitStack() as stack:

        def started(what: str, total: int) -> Callable[[], None]:
            stack.close()  # the bar before
            return stack.enter_context(progress(f"{what} {measured.name}", total, quiet=as_json))

        validation = validated(rows, profiles, jobs=jobs, on_start=started)
    _deliver(validation, output, html, as_json=as_json)


def _deliver(
    validation: Validation, output: Path | None, html: Path | None, *, as_json: bool
) -> None:
    try:
        if output is not None:
            write_text(rows_csv(validation), output)
        if html is not None:
            from twinstream.fidelity.scatter import scatter_html  # plotly is slow to import

            write_text(scatter_html(validation), html)
    finally:  # what was found is told, on a full disk too
        if as_json:
            print_json(validation_json(validation))
        else:
            print_report(validation_screen(validation))
    for path in (output, html):
        if path is not None and not as_json:
            print_report(f"Wrote {path}.")


def validation_json(validation: Validation) -> dict[str, object]:
    """Headline errors, then those by model and by length, and counts."""
    overall = validation.overall.model_dump()
    return {
        **{name: value for name, value in overall.items() if name != "schedules"},
        "stalled_mean_error": validation.stalled.mean_error,
        "cells": validation.cells,
        "schedules": validation.overall.schedules,
        "stalled_schedules": validation.stalled.schedules,
        "by_model": validation.by_model,
        "by_seq_len": validation.by_seq_len,
        "failed_rows": validation.failed_rows,
        "refused_alike": validation.refused_alike,
        "refused_rows": validation.refused_rows,
        "left_out": validation.left_out,
        "without_rows": validation.without_rows,
        "unknown": validation.unknown,
    }


def validate_clusters(
    tables: Sequence[Path], jobs: int | None, output: Path | None, *, as_json: bool
) -> None:
    """Predict every row of published tables, print errors, scaling, ratios and what fits.

    Raises:
        ClusterTableError: a file is none of the known tables.
        NothingScoredError: no row can be predicted.
    """
    rows = read_measured_steps(tables)
    with (
        progress(f"predicting {len(rows)} rows", len(rows), quiet=as_json) as step,
        RowPredictors(jobs, step) as predictors,
    ):
        predicted = predictors.predicted(rows, [None] * len(rows))
    validation = score(rows, predicted)
    try:
        if output is not None:
            write_text(of_clusters.rows_csv(validation), output)
    finally:  # what was found is told, on a full disk too
        if as_json:
            print_json(of_clusters.validation_json(validation))
        else:
            print_report(of_clusters.validation_screen(validation))
    if output is not None and not as_json:
        print_report(f"Wrote {output}.")
