"""`demo`: what `make demo` runs."""

import sys
from pathlib import Path
from shutil import which
from typing import Annotated

import typer
from rich import box

from twinstream.commands.arguments import options
from twinstream.commands.arguments.backends import backend_named
from twinstream.commands.arguments.outputs import check_folder
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plan_screens import describe
from twinstream.commands.runs.compare import comparison_json
from twinstream.demo import (
    ALL_ON_DEVICE,
    OTHER_CAPS,
    WITHIN_CAPS,
    Demo,
    DemoSettings,
    run_demo,
)
from twinstream.demo_loop import Loop
from twinstream.fidelity.fit_report import fit_json
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.run_report import losses_line
from twinstream.screens.tables import (
    groups_table,
    seconds,
    side_by_side_table,
    workload_line,
)

_BUG = 1


def demo(
    out: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            callback=check_folder,
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
    """Probe, plan within tight caps, predict, train on real text, compare, calibrate."""
    settings = DemoSettings(out, backend_named(backend), machine, steps, num_layers)
    result = run_demo(settings, lambda what, total: progress(what, total, quiet=as_json))
    if as_json:
        print_json(_json(result))
    else:
        _report(result)
    if not (result.same_losses and result.same_state):
        typer.echo("error: the runs differ, which is a bug in twinstream", err=True)
        raise typer.Exit(_BUG)


def _json(result: Demo) -> dict[str, object]:
    capped = result.capped
    return (
        capped.predicted_summary.model_dump()
        | describe(capped.schedule)
        | comparison_json(result.comparison, (capped.predicted_summary, capped.measured_summary))
        | {
            "losses": capped.run.losses,
            "losses_resident": result.resident.run.losses,
            "calibration": _loop_json(result.loop),
            "same_losses": result.same_losses,
            "same_state": result.same_state,
            "files": result.files,
            "uncertainty": uncertainty_of(result.machine, capped.schedule),
        }
    )


def _loop_json(loop: Loop) -> dict[str, object]:
    """Step times by the profile as probed and as calibrated; shares and errors are fractions."""
    return {
        "plans": [
            {
                "name": row.name,
                "policy": row.policy,
                "calibrated_with": row.calibrated_with,
                "measured_step_s": row.wall_ns / 1e9,
                "core_share": row.core_share,
                "counted_step_s": row.before.measured / 1e9,
                "before_step_s": row.before.predicted / 1e9,
                "before_error": row.before.error,
                "after_step_s": row.after.predicted / 1e9,
                "after_error": row.after.error,
            }
            for row in loop.rows
        ],
        "disturbed": loop.disturbed,
        "fit": fit_json(loop.fit),
    }


def _report(result: Demo) -> None:
    trials = {
        ALL_ON_DEVICE: result.resident, WITHIN_CAPS: result.capped, OTHER_CAPS: result.other
    }  # fmt: skip
    figures = {
        name: (trial.schedule, trial.predicted_summary, trial.measured_summary)
        for name, trial in trials.items()
    }
    capped, spec = result.capped, result.capped.schedule.model
    schedule, predicted, measured, machine, _ = result.files
    print_report(
        f"{spec['num_layers']} layers of width {spec['d_model']} on {result.machine.name}: "
        f"{workload_line(capped.schedule.workload)}",
        side_by_side_table(figures),
        groups_table(f"Busy time by kind of op, {WITHIN_CAPS}", result.comparison.kinds),
        "The profile, calibrated with the first two runs, and a plan that it has not seen:",
        _loop_table(result.loop),
        *([result.loop.disturbed] if result.loop.disturbed else []),
        losses_line(capped.run.losses),
        "Losses, parameters and optimizer states of the three runs are "
        + ("bit-identical." if result.same_losses and result.same_state else "NOT identical."),
        f"Schedule, timelines and profiles are in {schedule.parent}; to compare again:",
    )
    here = "twinstream" if which("twinstream") else sys.argv[0]  # `make` sets no PATH
    typer.echo(f"  {here} compare {schedule} {predicted} {measured} --machine {machine}")


def _loop_table(loop: Loop) -> FittedTable:
    """What is counted stands beside what was measured only where they differ."""
    busy = any(row.before.measured != row.wall_ns for row in loop.rows)
    table = FittedTable(box=box.SIMPLE_HEAD)
    for name in ("plan", "policy"):
        table.add_column(name)
    measured = ("measured", "counted") if busy else ("measured",)
    for name in (*measured, "as probed", "error", "calibrated", "error"):
        table.add_column(name, justify="right")
    for row in loop.rows:
        times_ns = (row.wall_ns, row.before.measured) if busy else (row.wall_ns,)
        table.add_row(
            row.name if row.calibrated_with else f"{row.name} (new)",
            row.policy,
            *(seconds(time_ns / 1e9) for time_ns in times_ns),
            seconds(row.before.predicted / 1e9),
            f"{row.before.error:+.1%}",
            seconds(row.after.predicted / 1e9),
            f"{row.after.error:+.1%}",
        )
    return table
