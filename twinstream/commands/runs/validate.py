"""`validate`: how far predictions are from speeds that someone measured."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.outputs import check_output, output_option
from twinstream.commands.output import print_report, progress, told_at_the_end
from twinstream.fidelity.cluster_report import ClusterReport, score_steps
from twinstream.fidelity.cluster_rows import read_measured_steps
from twinstream.fidelity.rows import rows_that
from twinstream.fidelity.scoring import Report
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
        if machine or measured or only:
            raise CalibrationError("--cluster goes with --jobs, -o, --html and --json alone")
        found = _cluster_report([cluster, *(tables or [])], jobs, quiet=as_json)
        _deliver(found, output, html, lambda: _scatter().cluster_scatter_html(found), as_json)
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

        report = validated(rows, profiles, jobs=jobs, on_start=started)
    _deliver(report, output, html, lambda: _scatter().scatter_html(report), as_json)


def _scatter() -> ModuleType:
    from twinstream.fidelity import scatter  # plotly is slow to import

    return scatter


def _deliver(
    report: Report[Any], output: Path | None, html: Path | None, page: Callable[[], str],
    as_json: bool,
) -> None:  # fmt: skip
    with told_at_the_end(report.json, as_json=as_json, screen=lambda: [report.screen()]):
        if output is not None:
            write_text(report.csv(), output)
        if html is not None:
            write_text(page(), html)
    for path in (output, html):
        if path is not None and not as_json:
            print_report(f"Wrote {path}.")


def _cluster_report(tables: Sequence[Path], jobs: int | None, *, quiet: bool) -> ClusterReport:
    rows = read_measured_steps(tables)
    with progress(f"predicting {len(rows)} rows", len(rows), quiet=quiet) as step:
        return ClusterReport(score_steps(rows, jobs=jobs, on_start=lambda _: step))
