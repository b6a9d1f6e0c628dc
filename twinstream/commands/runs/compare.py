"""`compare`: how far a prediction was off."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.inputs import (
    checked_schedule,
    machine_of,
    predicted_and_measured,
    read_timelines,
)
from twinstream.commands.cluster_inputs import holds_cluster, refuse_cluster_options
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plans.planning import describe
from twinstream.commands.ranks.comparing import compare_cluster_file
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import prediction_notes, uncertainty_of
from twinstream.schedule.analysis.comparison import Comparison, Pair
from twinstream.schedule.analysis.comparison import compare as join
from twinstream.schedule.files import DocumentError
from twinstream.screens.tables import comparison_tables, headline_errors, nondeterminism_notes
from twinstream.simulator.replay import simulate


def compare(  # noqa: PLR0913
    schedule: options.ScheduleFile,
    predicted: Annotated[
        Path | None, typer.Argument(metavar="PREDICTED", help="From `simulate -o`.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Argument(metavar="MEASURED", help="From `run -o`.")
    ] = None,
    of_run: Annotated[
        Path | None,
        typer.Option(
            "--measured", metavar="FILE", help="From `run -o`; what is predicted is simulated now."
        ),
    ] = None,
    machine: options.MachineIfKnown = None,
    cluster: options.ClusterIfKnown = None,
    as_json: options.Json = False,
) -> None:
    """Compare a predicted with a measured timeline of a schedule; MFU is of the machine's peak.

    Of a cluster's schedule all ranks measured are joined with what is predicted of their class.
    """
    measured = _measured(predicted, measured, of_run)
    where = options.Profiles(machine, cluster)
    if holds_cluster(schedule):
        compare_cluster_file(schedule, predicted, measured, where, as_json=as_json)
        return
    refuse_cluster_options(schedule, where)
    with progress(f"comparing {measured}", quiet=as_json):
        document = checked_schedule(schedule)
        profile = machine_of(document, machine)
        if predicted is None:
            before, after = simulate(document, profile), read_timelines(None, measured)[1]
            assert after is not None
        else:
            before, after = predicted_and_measured(predicted, measured)
        comparison = join(document, before, after)
        summaries = summarize(document, before, profile), summarize(document, after, profile)
    if as_json:
        uncertainty = {"uncertainty": uncertainty_of(profile, document)}
        print_json(describe(document) | comparison_json(comparison, *summaries) | uncertainty)
    else:
        tables = comparison_tables(comparison, *summaries, profile.name)
        print_report(
            *tables, *nondeterminism_notes(document), *prediction_notes(document, profile, before)
        )


def _measured(predicted: Path | None, measured: Path | None, of_run: Path | None) -> Path:
    """The one file of a measurement, given as an argument or as an option."""
    if of_run is not None and predicted is not None:
        raise DocumentError("give PREDICTED and MEASURED, or --measured alone")
    found = of_run or measured
    if found is None:
        raise DocumentError(
            "what was measured is missing: give PREDICTED and MEASURED, or --measured FILE alone"
        )
    return found


def comparison_json(
    comparison: Comparison, predicted: Summary, measured: Summary
) -> dict[str, object]:
    """Both summaries, the relative error of their headlines, and the join op by op."""
    return {
        "predicted": predicted,
        "measured": measured,
        "error": headline_errors(predicted, measured),
        "kinds": [_with_error(g.model_dump(), g.busy_ns) for g in comparison.kinds],
        "streams": [_with_error(g.model_dump(), g.busy_ns) for g in comparison.streams],
        "worst_ops": [_with_error(op.model_dump(), op.duration_ns) for op in comparison.worst_ops],
    }


def _with_error(document: dict[str, object], pair: Pair) -> dict[str, object]:
    return document | {"error": pair.error}
