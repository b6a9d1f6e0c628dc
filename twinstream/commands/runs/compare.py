"""`compare`: how far a prediction was off."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.inputs import predicted_and_measured, read_as
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plan_screens import describe
from twinstream.commands.schedule_inputs import ScheduleInputs, inputs_of
from twinstream.measures.metrics import Summary
from twinstream.measures.uncertainty import prediction_notes, uncertainty_of
from twinstream.planner.planner import gc_paused
from twinstream.schedule.analysis.comparison import Comparison, GroupComparison, Pair
from twinstream.schedule.analysis.comparison import compare as join
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import DocumentError
from twinstream.schedule.timeline import Timeline
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
    notes = []
    with progress(f"comparing {measured}", quiet=as_json), gc_paused():
        found, summaries, inputs = _joined(schedule, predicted, measured, where)
        shown = comparison_json(found, summaries)
        if inputs is not None:
            shown["uncertainty"] = uncertainty_of(inputs.machine, inputs.schedule)
        if inputs is not None and (document := inputs.schedule).is_one_device:
            line = inputs.timeline() if predicted is None else read_as(Timeline, predicted)
            shown = describe(document) | shown
            notes = nondeterminism_notes(document.only)
            notes += prediction_notes(document, inputs.machine, line)
    if as_json:
        print_json(shown)
    else:
        peak_of = "" if inputs is None else inputs.machine.name
        busy = [found.disturbed] if found.disturbed else []
        print_report(*comparison_tables(found, summaries, peak_of), *busy, *notes)


_Joined = tuple[Comparison, tuple[Summary, Summary] | None, ScheduleInputs | None]


def _joined(path: Path, predicted: Path | None, measured: Path, where: options.Profiles) -> _Joined:
    """The join, both summaries, and what they are of; with a prediction the cluster of ranks may be
    unknown."""
    if predicted is None:
        inputs = inputs_of(path, where)
        before, after = inputs.timeline(), inputs.measured(measured)
        assert after is not None
    else:
        before, after = predicted_and_measured(predicted, measured)
        schedule = read_as(Schedule, path)
        if not schedule.is_one_device:
            return join(schedule, before, after), None, None
        inputs = inputs_of(path, where)
    found = join(inputs.schedule, before, after)
    return found, (inputs.summary(before), inputs.summary(after)), inputs


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
    found: Comparison, summaries: tuple[Summary, Summary] | None
) -> dict[str, object]:
    """Both summaries, the relative error of their headlines, and the join op by op."""
    shown: dict[str, object] = {
        "step_ns": _pair(found.step_ns),
        "cold_ns": _pair(found.cold_ns),
        **_groups(found),
    }
    if summaries is not None:
        predicted, measured = summaries
        errors = headline_errors(predicted, measured)
        shown |= {"predicted": predicted, "measured": measured, "error": errors}
    if found.ranks:
        shown["clock_error_ns"] = found.clock_error_ns
        shown["ranks"] = [
            {
                "name": one.name,
                "step_ns": _pair(one.comparison.step_ns),
                **_groups(one.comparison),
                "said": [_group(group) for group in one.said],
            }
            for one in found.ranks
        ]
    return shown


def _groups(found: Comparison) -> dict[str, object]:
    return {
        "kinds": [_group(group) for group in found.kinds],
        "streams": [_group(group) for group in found.streams],
        "worst_ops": [
            op.model_dump(exclude=None if op.rank else {"rank"}) | {"error": op.duration_ns.error}
            for op in found.worst_ops
        ],
    }


def _pair(pair: Pair) -> dict[str, float]:
    return pair.model_dump() | {"error": pair.error}


def _group(group: GroupComparison) -> dict[str, object]:
    return group.model_dump() | {"error": group.busy_ns.error}
