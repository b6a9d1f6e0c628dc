"""`report`: a schedule and its timelines, or a run, as one page to look at."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream.clusters.running.places import UnknownMachineError, machine_for
from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import checked_schedule
from twinstream.commands.arguments.outputs import output_option, require_own_outputs
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.schedule_inputs import (
    ScheduleInputs,
    inputs_of,
    refuse_cluster_options,
)
from twinstream.commands.simulate import about_prediction
from twinstream.log.layout_choice import LayoutChoice
from twinstream.log.run_files import PLAN, RunFiles
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.planner.planner import gc_paused
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import DocumentError, read_document, write_text
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import simulate


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
    with progress(f"drawing {subject}", quiet=as_json), gc_paused():
        if subject.is_dir():
            if predicted is not None or measured is not None:
                raise DocumentError(
                    f"{subject} is a folder, and --predicted and --measured are timelines of a "
                    "schedule: give the schedule instead, or leave them out"
                )
            html, figures = _of_run(subject, where, output)
        else:
            html, figures = _of_schedule(inputs_of(subject, where), predicted, measured)
        write_text(html, output)
    size_bytes = output.stat().st_size
    if as_json:
        print_json({"output": output, "size_bytes": size_bytes} | figures)
    else:
        print_report(f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in any browser.")


def _of_schedule(
    inputs: ScheduleInputs, predicted: Path | None, measured: Path | None
) -> tuple[str, dict[str, object]]:
    """The page, and the figures that `--json` prints."""
    from twinstream.report.report import report_html

    before, after = inputs.timeline(predicted), inputs.measured(measured)
    html = report_html(
        inputs.schedule, inputs.machine, predicted=before, measured=after, notes=inputs.told
    )
    return html, _figures(inputs, before, after)


def _figures(inputs: ScheduleInputs, before: Timeline, after: Timeline | None) -> dict[str, object]:
    """What is predicted, and what was measured where it was."""
    summary = inputs.summary(before)
    found: dict[str, object] = {
        "uncertainty": uncertainty_of(inputs.machine, inputs.schedule),
        "predicted": summary.model_dump() | about_prediction(inputs, before, summary),
    }
    if after is not None:
        clocks = {} if after.is_one_device else {"clock_error_ns": after.clock_error_ns}
        found["measured"] = inputs.summary(after).model_dump() | clocks
    return found


def _of_run(folder: Path, where: options.Profiles, output: Path) -> tuple[str, dict[str, object]]:
    """The page, and the figures that `--json` prints."""
    from twinstream.report.ranks_part import RanksPart
    from twinstream.report.run_folder import read_run_folder, run_summary
    from twinstream.report.run_page import run_html

    require_own_outputs({path.name: path for path in RunFiles(folder).read} | {"output": output})
    run = read_run_folder(folder)
    figures: dict[str, object] = {"run": run_summary(run)}
    files = RunFiles(folder)
    if files.cluster.exists():
        inputs = inputs_of(files.cluster, where)
        after = inputs.measured(files.measured) if files.measured.exists() else None
        choice = read_document(LayoutChoice, files.layouts) if files.layouts.exists() else None
        part = RanksPart(
            inputs.schedule, inputs.timeline(), inputs.machine, after, choice, inputs.told
        )  # fmt: skip
        return run_html(run, ranks=part), figures | _figures(inputs, part.predicted, after)
    refuse_cluster_options(folder, where)
    schedule = checked_schedule(folder / PLAN) if (folder / PLAN).exists() else None
    before = None if schedule is None else _predicted(schedule, where.machine)
    return run_html(run, schedule=schedule, predicted=before), figures


def _predicted(schedule: Schedule, machine: str | None) -> Timeline | None:
    """None where the machine that it was planned for is not known here."""
    try:
        return simulate(schedule, machine_for(schedule, machine))
    except UnknownMachineError:
        return None
