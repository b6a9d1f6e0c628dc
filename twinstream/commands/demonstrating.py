"""`demo`: what `make demo` runs."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands import options
from twinstream.commands.backends import backend_named
from twinstream.commands.comparing import comparison_json
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.planning import describe
from twinstream.demo import Demo, DemoSettings, run_demo
from twinstream.tables import comparison_tables, losses_line, side_by_side_table, workload_line
from twinstream.uncertainty import prediction_notes, uncertainty_of

_BUG = 1


def demo(
    out: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            callback=options.check_folder,
            help="Write JSON here.",
        ),
    ] = Path("out/demo"),
    backend: options.Backend = "cpu",
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="By default this machine's CPU, measured first."),
    ] = None,
    steps: options.Steps = 6,
    num_layers: Annotated[int, typer.Option(min=1, hidden=True)] = 6,
    as_json: options.Json = False,
) -> None:
    """Probe, plan within tight caps, predict, train on real text and compare, in a minute."""
    settings = DemoSettings(out, backend_named(backend), machine, steps, num_layers)
    result = run_demo(settings, lambda what, total: progress(what, total, quiet=as_json))
    if as_json:
        print_json(_json(result))
    else:
        _report(result)
    if not (result.same_losses and result.same_state):
        typer.echo("error: the two runs differ, which is a bug in twinstream", err=True)
        raise typer.Exit(_BUG)


def _json(result: Demo) -> dict[str, object]:
    capped = result.capped
    return (
        capped.predicted_summary.model_dump()
        | describe(capped.schedule)
        | comparison_json(result.comparison, capped.predicted_summary, capped.measured_summary)
        | {
            "losses": capped.run.losses,
            "losses_resident": result.resident.run.losses,
            "same_losses": result.same_losses,
            "same_state": result.same_state,
            "files": result.files,
            "uncertainty": uncertainty_of(result.machine),
        }
    )


def _report(result: Demo) -> None:
    trials = {"all on the device": result.resident, "within the caps": result.capped}
    figures = {
        name: (trial.schedule, trial.predicted_summary, trial.measured_summary)
        for name, trial in trials.items()
    }
    capped, spec = result.capped, result.capped.schedule.model.spec
    schedule, predicted, measured, machine = result.files
    print_report(
        f"{spec['num_layers']} layers of width {spec['d_model']} on {result.machine.name}: "
        f"{workload_line(capped.schedule.workload)}",
        side_by_side_table(figures),
        *comparison_tables(
            result.comparison,
            capped.predicted_summary,
            capped.measured_summary,
            result.machine.name,
        ),
        *prediction_notes(capped.schedule, result.machine),
        *(f"{name}: {losses_line(trial.run.losses)}" for name, trial in trials.items()),
        "Losses, parameters and optimizer states of the two runs are "
        + ("bit-identical." if result.same_losses and result.same_state else "NOT identical."),
        f"Schedule, timelines and profile are in {schedule.parent}; to compare again:",
    )
    typer.echo(f"  twinstream compare {schedule} {predicted} {measured} --machine {machine}")
