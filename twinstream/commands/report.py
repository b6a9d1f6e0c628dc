"""`report`: a schedule and its timelines, or a run, as one page to look at."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import (
    UnknownMachineError,
    checked_schedule,
    machine_of,
    read_timelines,
)
from twinstream.commands.arguments.outputs import output_option, require_own_outputs
from twinstream.commands.cluster_inputs import holds_cluster, refuse_cluster_options
from twinstream.commands.documents.clusters import ranks_of_run, report_cluster_file
from twinstream.commands.output import print_json, print_report, progress
from twinstream.log.run_files import CLUSTER, PLAN, RunFiles
from twinstream.measures.metrics import summarize
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import DocumentError, write_text
from twinstream.schedule.timeline import Timeline


@grouped()
def report(
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="SCHEDULE|DIR", help="A schedule's JSON, or a folder with a run's log."
        ),
    ],
    where: options.Profiles,
    predicted: options.Predicted = None,
    measured: options.Measured = None,
    output: Annotated[Path, output_option("Write the page here.")] = Path("report.html"),
    as_json: options.Json = False,
) -> None:
    """Write one HTML page: of a schedule its step, predicted beside measured, or of a run its loss.

    Without --predicted a schedule is simulated. A run's page may be made while it trains.
    A cluster's page has a group of lanes for each class of ranks.
    """
    if holds_cluster(subject):
        report_cluster_file(subject, where, predicted, measured, output, as_json=as_json)
        return
    if not holds_cluster(subject / CLUSTER):
        refuse_cluster_options(subject, where)
    with progress(f"drawing {subject}", quiet=as_json):
        if subject.is_dir():
            if predicted is not None or measured is not None:
                raise DocumentError(
                    f"{subject} is a folder, and --predicted and --measured are timelines of a "
                    "schedule: give the schedule instead, or leave them out"
                )
            html, figures = _of_run(subject, where, output)
        else:
            html, figures = _of_schedule(subject, predicted, measured, where.machine)
        write_text(html, output)
    size_bytes = output.stat().st_size
    if as_json:
        print_json({"output": output, "size_bytes": size_bytes} | figures)
    else:
        print_report(f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in any browser.")


def _of_schedule(
    schedule: Path, predicted: Path | None, measured: Path | None, machine: str | None
) -> tuple[str, dict[str, object]]:
    """The page, and the figures that `--json` prints."""
    from twinstream.report.report import report_html

    document = checked_schedule(schedule)
    profile = machine_of(document, machine)
    before, after = read_timelines(predicted, measured)
    before = before or api.simulate(document, profile)
    html = report_html(document, profile, predicted=before, measured=after)
    figures: dict[str, object] = {"uncertainty": uncertainty_of(profile, document)}
    for name, line in (("predicted", before), ("measured", after)):
        if line is not None:
            figures[name] = summarize(document, line, profile)
    return html, figures


def _of_run(folder: Path, where: options.Profiles, output: Path) -> tuple[str, dict[str, object]]:
    """The page, and the figures that `--json` prints."""
    from twinstream.report.run_folder import read_run_folder, run_summary
    from twinstream.report.run_page import run_html

    require_own_outputs({path.name: path for path in RunFiles(folder).read} | {"output": output})
    run = read_run_folder(folder)
    figures: dict[str, object] = {"run": run_summary(run)}
    if (folder / CLUSTER).exists():
        ranks, of_ranks = ranks_of_run(RunFiles(folder), where)
        return run_html(run, ranks=ranks), figures | of_ranks
    schedule = checked_schedule(folder / PLAN) if (folder / PLAN).exists() else None
    before = None if schedule is None else _predicted(schedule, where.machine)
    return run_html(run, schedule=schedule, predicted=before), figures


def _predicted(schedule: Schedule, machine: str | None) -> Timeline | None:
    """None where the machine that it was planned for is not known here."""
    try:
        return api.simulate(schedule, machine_of(schedule, machine))
    except UnknownMachineError:
        return None
