"""`calibrate`: fit a machine's or a cluster's profile to what was measured."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.inputs import checked_schedule, read_timeline
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.runs.calibrating_collectives import calibrate_collectives
from twinstream.commands.runs.calibrating_ranks import calibrate_ranks
from twinstream.commands.runs.calibrating_steps import calibrate_steps
from twinstream.fidelity.cell_workers import CellWorkers
from twinstream.fidelity.fit_report import (
    ending,
    fit_json,
    observation_table,
    parameter_table,
    provenance,
)
from twinstream.fidelity.rows import candidate_rows, listed_rows, rows_of
from twinstream.fidelity.table_fit import fit_table, informative_rows
from twinstream.fidelity.timeline_fit import fit_timelines
from twinstream.hardware_profiles.calibration.fitting import Fit
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.measured_table import read_measured
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule

Base = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE", help="The profile to start from; its efficiencies are the prior."
    ),
]
Measured = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A CSV table of measured runs (configuration, step time)."),
]
Cells = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A CSV of the rows to calibrate with; by default at most 14: those that tell most of "
        "the profile, by predictions alone.",
    ),
]
ScheduleFile = Annotated[
    Path | None, typer.Option("--schedule", metavar="FILE", help="A schedule that was run.")
]
Collectives = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What nccl-tests printed, or a CSV of it (n, collective, bytes, time_us): curves of a "
        "cluster's collectives.",
    ),
]
Steps = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="A published table of steps of clusters; may be given again. Fits constants of "
        "--only gpu=NAME.",
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="The cluster's profile that gets the curves."),
]
Anyway = Annotated[
    bool,
    typer.Option(
        "--anyway", help="Write the profile even where its base predicts the rows better."
    ),
]
TimelineFile = Annotated[
    Path | None, typer.Option("--timeline", metavar="FILE", help="Its timeline, from `run -o`.")
]


def calibrate(  # noqa: PLR0913
    base: Base = None,
    measured: Measured = None,
    cells: Cells = None,
    only: options.OnlyRows = None,
    schedule: ScheduleFile = None,
    timeline: TimelineFile = None,
    collectives: Collectives = None,
    steps: Steps = None,
    cluster: ClusterName = None,
    output: Annotated[Path | None, output_option("Write the profile here, as TOML.")] = None,
    anyway: Anyway = False,
    as_json: options.Json = False,
) -> None:
    """Fit a profile: a machine's to step times or a run of ours, a cluster's to collectives,
    published steps or a run of ranks here."""
    if steps and not any((base, measured, cells, schedule, timeline, collectives)):
        calibrate_steps(steps, cluster, _gpu(only or []), output, as_json=as_json)
        return
    if collectives is not None and not any((base, measured, cells, schedule, timeline)):
        calibrate_collectives(collectives, cluster, only or [], output, as_json=as_json)
        return
    if collectives is not None or cluster is not None or base is None:
        raise CalibrationError(
            "give either --base and what was measured of a machine (--measured TABLE.csv, or "
            "--schedule and --timeline), or --cluster and --collectives FILE or --steps FILE"
        )
    profile = load_machine(base)
    if measured is not None and schedule is None and timeline is None:
        fit = _table_fit(profile, measured, cells, only or [], quiet=as_json)
        told = measured.name
    elif measured is None and schedule is not None and timeline is not None:
        document = checked_schedule(schedule)
        if not document.is_one_device:
            calibrate_ranks(profile, document, timeline, output, anyway=anyway, as_json=as_json)
            return
        fit = _timeline_fit(profile, document, timeline, quiet=as_json)
        told = timeline.name
    else:
        raise CalibrationError(
            "give what was measured: either --measured TABLE.csv, or --schedule and --timeline of "
            "a run"
        )
    source = provenance(fit, told, datetime.now(UTC).date())
    fitted = fit.machine(output.stem if output else f"{profile.name}_fitted", source)
    try:
        if output is not None:
            if not anyway:
                fit.require_no_worse()
            save_machine(fitted, output)
    finally:  # what was fitted is told, on a full disk too
        if as_json:
            print_json(fit_json(fit))
        else:
            print_report(parameter_table(fit), observation_table(fit), ending(fit))
    if output is not None and not as_json:
        print_report(f"Wrote the profile to {output}; use it as --machine {output}.")


def _gpu(only: list[str]) -> str | None:
    """The GPU type of a condition gpu=NAME, the only one that steps of clusters know."""
    conditions = [condition.partition("=") for condition in only]
    return conditions[0][2] if [one[0] for one in conditions] == ["gpu"] else None


def _table_fit(
    profile: Machine, measured: Path, cells: Path | None, only: list[str], *, quiet: bool
) -> Fit:
    rows = rows_of(read_measured(measured), profile, only)
    if cells is not None:
        chosen = listed_rows(rows, cells)
    else:
        with progress(f"sizing {measured.name}", len(rows), quiet=quiet) as step:
            chosen = candidate_rows(rows, step)
    with CellWorkers(profile) as workers:
        with progress(f"planning {len(chosen)} rows", len(chosen), quiet=quiet) as step:
            workers.hold(chosen, step)
        if cells is None:
            told = f"choosing of {len(chosen)} rows: predictions"
            with progress(told, quiet=quiet) as step:
                chosen = informative_rows(profile, chosen, step, workers=workers)
        told = f"fitting {len(chosen)} of {len(rows)} rows: predictions"
        with progress(told, quiet=quiet) as step:
            return fit_table(profile, chosen, step, workers)


def _timeline_fit(profile: Machine, document: Schedule, timeline: Path, *, quiet: bool) -> Fit:
    measured = read_timeline(timeline, "measured", "--timeline")
    with progress("fitting: replays", quiet=quiet) as step:
        return fit_timelines(profile, [(document.only, measured.only)], step)
