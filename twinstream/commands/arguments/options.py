"""The options that commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ScheduleFile = Annotated[Path, typer.Argument(metavar="SCHEDULE", help="A schedule's JSON.")]
MachineIfKnown = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME|FILE",
        help="By default the machine that the schedule was planned for, if it is a shipped one.",
    ),
]
ClusterIfKnown = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="The profile of a cluster's schedule; by default the shipped one that it was "
        "made for, or the profile beside its file.",
    ),
]
Stragglers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHO=FACTOR",
        help="A class of ranks of a cluster, or 'rank 5', is so many times slower; repeatable.",
    ),
]


@dataclass(frozen=True)
class Profiles:
    """On what: a machine by name or file, or a cluster, and then the machine is its nodes'."""

    machine: MachineIfKnown = None
    cluster: ClusterIfKnown = None
    straggler: Stragglers = None


DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and stop.")]
Predicted = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A timeline from `simulate -o`; by default the schedule is simulated."
    ),
]
Measured = Annotated[Path | None, typer.Option(metavar="FILE", help="A timeline from `run -o`.")]
OnlyRows = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="COLUMN=VALUE",
        help="Take only such rows of the table: machine=H100, model=8B; may be given again.",
    ),
]
Backend = Annotated[
    str, typer.Option(metavar="NAME", help="auto (CUDA where there is one), cpu or cuda.")
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Training steps; the first is cold.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
