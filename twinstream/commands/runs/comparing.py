"""`compare`: how far a prediction was off."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.inputs import (
    checked_schedule,
    machine_of,
    predicted_and_measured,
)
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plans.planning import describe
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import prediction_notes, uncertainty_of
from twinstream.schedule.analysis.comparison import Comparison, Pair
from twinstream.schedule.analysis.comparison import compare as join
from twinstream.screens.tables import comparison_tables, headline_errors, nondeterminism_notes


def compare(
    schedule: options.ScheduleFile,
    predicted: Annotated[Path, typer.Argument(metavar="PREDICTED", help="From `simulate -o`.")],
    measured: Annotated[Path, typer.Argument(metavar="MEASURED", help="From `run -o`.")],
    machine: options.MachineIfKnown = None,
    as_json: options.Json = False,
) -> None:
    """Compare a predicted with a measured timeline of a schedule; MFU is of the machine's peak."""
    with progress(f"comparing {predicted} and {measured}", quiet=as_json):
        document = checked_schedule(schedule)
        before, after = predicted_and_measured(predicted, measured)
        profile = machine_of(document, machine)
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
