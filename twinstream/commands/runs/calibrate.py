"""`calibrate`: fit a machine's or a cluster's profile to what was measured."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.inputs import checked_schedule, read_timeline
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import print_report, progress, told_at_the_end
from twinstream.fidelity.cluster_rows import ClusterRow, Values, read_measured_steps
from twinstream.fidelity.constants import with_constants
from twinstream.fidelity.constants_fit import ConstantsFit, fit_constants
from twinstream.fidelity.fit_report import (
    ending,
    fit_json,
    observation_table,
    parameter_table,
    provenance,
)
from twinstream.fidelity.measured import Predicted, Predictors, predicted
from twinstream.fidelity.ranks_fit import curve_told, fit_ranks
from twinstream.fidelity.rows import candidate_rows, listed_rows, rows_of
from twinstream.fidelity.scoring import table_of
from twinstream.fidelity.table_fit import fit_table, hold, informative_rows
from twinstream.fidelity.timeline_fit import fit_timelines
from twinstream.hardware_profiles.calibration.fitting import Fit
from twinstream.hardware_profiles.clusters.loader import (
    load_cluster,
    machine_of,
    save_cluster,
    save_with_node,
)
from twinstream.hardware_profiles.collectives.fitting import CalibratedCluster, calibrated
from twinstream.hardware_profiles.collectives.reading import chosen, read_points
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.measured_table import read_measured
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import require_timeline_of
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import curves_table

_OF_TIMELINE = "the machine of the timeline"

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
        "--anyway", help="Write the profile even where it stays far off, or its base is better."
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
        _calibrate_steps(steps, cluster, _gpu(only or []), output, as_json=as_json)
        return
    if collectives is not None and not any((base, measured, cells, schedule, timeline)):
        _calibrate_collectives(collectives, cluster, only or [], output, as_json=as_json)
        return
    if collectives is not None or cluster is not None or base is None:
        raise CalibrationError(
            "give either --base and what was measured of a machine (--measured TABLE.csv, or "
            "--schedule and --timeline), or --cluster and --collectives FILE or --steps FILE"
        )
    profile = load_machine(base)
    if measured is not None and schedule is None and timeline is None:
        fit = _table_fit(profile, measured, cells, only or [], quiet=as_json)
        told, measured_on = measured.name, "the table's machine"
    elif measured is None and schedule is not None and timeline is not None:
        document = checked_schedule(schedule)
        if not document.is_one_device:
            _calibrate_ranks(profile, document, timeline, output, anyway=anyway, as_json=as_json)
            return
        fit = _timeline_fit(profile, document, timeline, quiet=as_json)
        told, measured_on = timeline.name, _OF_TIMELINE
    else:
        raise CalibrationError(
            "give what was measured: either --measured TABLE.csv, or --schedule and --timeline of "
            "a run"
        )
    if not anyway:
        fit.require_same_machine(measured_on)
    source = provenance(fit, told, datetime.now(UTC).date())
    fitted = fit.machine(output.stem if output else f"{profile.name}_fitted", source)
    with told_at_the_end(
        lambda: fit_json(fit),
        as_json=as_json,
        screen=lambda: [parameter_table(fit), observation_table(fit), ending(fit)],
    ):
        if output is not None:
            if not anyway:
                fit.require_no_worse()
            save_machine(fitted, output)
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
    with Predictors(hold=True) as held:
        with progress(f"planning {len(chosen)} rows", len(chosen), quiet=quiet) as step:
            hold(held, profile, chosen, step)
        if cells is None:
            told = f"choosing of {len(chosen)} rows: predictions"
            with progress(told, quiet=quiet) as step:
                chosen = informative_rows(profile, chosen, step, predictors=held)
        told = f"fitting {len(chosen)} of {len(rows)} rows: predictions"
        with progress(told, quiet=quiet) as step:
            return fit_table(profile, chosen, step, held)


def _timeline_fit(profile: Machine, document: Schedule, timeline: Path, *, quiet: bool) -> Fit:
    measured = read_timeline(timeline, "measured", "--timeline")
    with progress("fitting: replays", quiet=quiet) as step:
        return fit_timelines(profile, [(document.only, measured.only)], step)


def _calibrate_collectives(
    collectives: Path, cluster: str | None, only: list[str], output: Path | None, *, as_json: bool
) -> None:
    """Fit curves to a file of measured collectives, write the profile, tell how good they are.

    Raises:
        CalibrationError: no cluster is given, or a condition is not `gpu_type=NAME`.
        TwinstreamError: as the file and the profile are read.
    """
    if cluster is None:
        raise CalibrationError(
            "--collectives needs --cluster: the profile that the curves are added to, by name "
            "(twinstream clusters) or as a TOML file"
        )
    profile = load_cluster(cluster)
    points = chosen(read_points(collectives), _gpu_type(only))
    name = output.stem if output else f"{profile.name}_calibrated"
    found = calibrated(profile, points, name, collectives.name, datetime.now(UTC).date())
    with told_at_the_end(
        lambda: _curves_document(found),
        as_json=as_json,
        screen=lambda: [curves_table(found.fitted)],
    ):
        if output is not None:
            save_cluster(found.cluster, output)
    if output is not None and not as_json:
        print_report(f"Wrote the profile of cluster '{name}' to {output}.")


def _gpu_type(only: list[str]) -> str | None:
    if not only:
        return None
    column, _, value = only[0].partition("=")
    if len(only) > 1 or column != "gpu_type" or not value:
        raise CalibrationError(
            f"--only {' '.join(only)}: of collectives one condition can be given, gpu_type=NAME"
        )
    return value


def _curves_document(found: CalibratedCluster) -> dict[str, object]:
    return {
        "cluster": found.cluster.name,
        "curves": [
            one.curve.model_dump(exclude={"lines", "points"})
            | {
                "form": one.curve.form,
                "num_points": one.num_points,
                "error": one.error,
                "left_out_error": one.left_out_error,
            }
            for one in found.fitted
        ],
    }


def _calibrate_ranks(
    base: Machine,
    document: Schedule,
    timeline: Path,
    output: Path | None,
    *,
    anyway: bool,
    as_json: bool,
) -> None:
    """Fit the profile; write it, and beside it that of a node, NAME_node.toml.

    Args:
        anyway: write it even where it stays far off, or the base predicts the kernels better.

    Raises:
        CalibrationError: the name is no TOML file's, or too little was measured.
        TwinstreamError: as the files are read.
    """
    if output is not None and output.suffix != ".toml":
        raise CalibrationError(f"name the profile {output.stem}.toml: it names its node's file")
    name = output.stem if output else "ranks"
    told = f"{timeline.name} on {datetime.now(UTC).date().isoformat()}"
    with progress(f"fitting to {timeline}", quiet=as_json):
        measured = read_timeline(timeline, "measured", "--timeline")
        require_timeline_of(document, measured)
        found = fit_ranks(base, [(document, measured)], name, told)
    if not anyway:
        found.kernels.require_same_machine(_OF_TIMELINE)
    with told_at_the_end(
        lambda: fit_json(found.kernels) | {"curves": found.cluster.curves},
        as_json=as_json,
        screen=lambda: [
            parameter_table(found.kernels),
            observation_table(found.kernels),
            f"{found.cluster.description}.",
            *map(curve_told, found.cluster.curves),
        ],
    ):
        if output is not None:
            if not anyway:
                found.kernels.require_no_worse()
            save_with_node(found.cluster, found.machine, output)
    if output is not None and not as_json:
        print_report(f"Wrote the profile to {output}; use it as --cluster {output}.")


def _calibrate_steps(
    tables: list[Path], cluster: str | None, gpu: str | None, output: Path | None, *, as_json: bool
) -> None:
    """Fit the constants of a GPU type, write the cluster and its node, tell how good they are.

    The cluster goes to `output`, the node's machine beside it, as NAME_node.toml.

    Raises:
        CalibrationError: no cluster or GPU type is given, or no row is for it.
        TwinstreamError: as tables and profiles are read.
    """
    if cluster is None or gpu is None:
        raise CalibrationError(
            "--steps needs --cluster, the profile that gets the constants (twinstream clusters), "
            "and --only gpu=NAME, the GPU type of the tables that it has: A100, H100"
        )
    profile = load_cluster(cluster)
    rows = read_measured_steps(tables)
    with progress("fitting: predictions", quiet=as_json) as step, Predictors(hold=True) as held:

        def predict(asked: Sequence[ClusterRow], values: Sequence[Values]) -> list[Predicted]:
            return held.ask(predicted, list(zip(asked, values, strict=True)), step)

        fit = fit_constants(gpu, rows, predict)
    source = _constants_source(fit, [table.name for table in tables])
    machine, fitted = with_constants(machine_of(profile), profile, fit.values, source)
    with told_at_the_end(
        fit.model_dump,
        as_json=as_json,
        screen=lambda: [_constants_table(fit), _constants_told(fit)],
    ):
        if output is not None:
            node = machine.model_copy(update={"name": f"{output.stem}_node"})
            changes = {"name": output.stem, "machine_changes": {}}
            save_with_node(fitted.model_copy(update=changes), node, output)
    if output is not None and not as_json:
        print_report(f"Wrote the cluster to {output}, and its node beside it.")


def _constants_source(fit: ConstantsFit, tables: Sequence[str]) -> str:
    """One sentence for the profiles: what the constants were fitted to, when, how well it went."""
    return (
        f"fitted to {fit.rows} steps of {', '.join(tables)} on {datetime.now(UTC).date()}, mean "
        f"error {fit.mean_error:.1%} of them, bias {fit.bias:+.1%}"
    )


def _constants_table(fit: ConstantsFit) -> FittedTable:
    """Each constant: value with its spread, bounds, meaning."""
    lines = [
        (
            one.name,
            f"{one.value:.4g}",
            f"{one.width:.2g}",
            f"{one.low:g} to {one.high:g}",
            one.meaning + (" (at its bound)" if one.at_bound else ""),
        )
        for one in fit.constants
    ]
    table = table_of(("constant",), ("fitted", "+/-", "bounds"))
    table.add_column("")
    for line in lines:
        table.add_row(*line)
    return table


def _constants_told(fit: ConstantsFit) -> str:
    told = (
        f"{fit.rows} rows of {fit.families} configurations: mean error {fit.mean_error:.1%}, bias "
        f"{fit.bias:+.1%}; {fit.start_mean_error:.1%} at the start. {fit.num_predictions} "
        "predictions."
    )
    if fit.left_out:
        told += f" {len(fit.left_out)} cannot be predicted, first {fit.left_out[0]}."
    return told
