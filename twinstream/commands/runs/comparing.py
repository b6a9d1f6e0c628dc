"""`compare`: how far a prediction was off."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from twinstream.commands.arguments import options
from twinstream.commands.arguments.inputs import predicted_and_measured, read_as
from twinstream.commands.cluster_inputs import (
    ClusterInputs,
    DeviceInputs,
    cluster_inputs,
    holds_cluster,
    inputs_of,
    measured_of_cluster,
    read_cluster,
)
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plans.planning import describe
from twinstream.measures.cluster_comparison import ClusterComparison, compare_cluster
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import prediction_notes, uncertainty_of
from twinstream.planner.planner import gc_paused
from twinstream.schedule.analysis.comparison import Comparison, GroupComparison, Pair
from twinstream.schedule.analysis.comparison import compare as join
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.files import DocumentError
from twinstream.screens.ranks_screen import ranks_compared_tables
from twinstream.screens.tables import comparison_tables, headline_errors, nondeterminism_notes


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
    with progress(f"comparing {measured}", quiet=as_json), gc_paused():
        if holds_cluster(schedule):
            shown, tables = _of_ranks(schedule, predicted, measured, where)
        else:
            shown, tables = _of_device(inputs_of(schedule, where), predicted, measured)
    if as_json:
        print_json(shown)
    else:
        print_report(*tables)


def _of_device(
    inputs: DeviceInputs | ClusterInputs, predicted: Path | None, measured: Path
) -> tuple[dict[str, object], list[RenderableType]]:
    """The join as JSON, and as tables."""
    assert isinstance(inputs, DeviceInputs)
    document, profile = inputs.schedule, inputs.machine
    if predicted is None:
        before, after = inputs.timeline(), inputs.measured(measured)
        assert after is not None
    else:
        before, after = predicted_and_measured(predicted, measured)
    comparison = join(document, before, after)
    summaries = summarize(document, before, profile), summarize(document, after, profile)
    shown = describe(document) | comparison_json(comparison, *summaries)
    return shown | {"uncertainty": uncertainty_of(profile, document)}, [
        *comparison_tables(comparison, *summaries, profile.name),
        *nondeterminism_notes(document),
        *prediction_notes(document, profile, before),
    ]


def _of_ranks(
    path: Path, predicted: Path | None, measured: Path, where: options.Profiles
) -> tuple[dict[str, object], list[RenderableType]]:
    """Each rank measured is joined with its class predicted."""
    if predicted is None:
        inputs = cluster_inputs(path, where)
        schedule, before = inputs.schedule, inputs.timeline()
    else:
        schedule, before = read_cluster(path), read_as(ClusterTimeline, predicted)
    found = compare_cluster(schedule, before, measured_of_cluster(schedule, measured))
    return ranks_json(found), [*ranks_compared_tables(found)]


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


def ranks_json(found: ClusterComparison) -> dict[str, object]:
    """Everything that is joined, with its errors."""
    return {
        "step_ns": _pair(found.step_ns),
        "cold_ns": _pair(found.cold_ns),
        "clock_error_ns": found.clock_error_ns,
        "kinds": [_group(group) for group in found.kinds],
        "ranks": [
            {
                "name": one.name,
                "step_ns": _pair(one.comparison.step_ns),
                "kinds": [_group(group) for group in one.comparison.kinds],
                "streams": [_group(group) for group in one.comparison.streams],
                "said": [_group(group) for group in one.said],
                "worst_ops": [
                    op.model_dump() | {"error": op.duration_ns.error}
                    for op in one.comparison.worst_ops
                ],
            }
            for one in found.ranks
        ],
    }


def _pair(pair: Pair) -> dict[str, float]:
    return pair.model_dump() | {"error": pair.error}


def _group(group: GroupComparison) -> dict[str, object]:
    return group.model_dump() | {"error": group.busy_ns.error}
