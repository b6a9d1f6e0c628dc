"""`simulate`: predict how a schedule would run on a machine."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream import api
from twinstream.commands import options
from twinstream.commands.inputs import checked_schedule, machine_of
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.planning import describe
from twinstream.metrics import summarize
from twinstream.schedule.files import write_document
from twinstream.tables import summary_table, utilization_table


def simulate(
    schedule: Annotated[Path, typer.Argument(metavar="SCHEDULE", help="A schedule's JSON.")],
    machine: options.MachineIfKnown = None,
    output: Annotated[Path | None, options.output("Write the predicted timeline here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Predict a schedule's timeline on a machine, whatever machine it was planned for."""
    with progress(f"simulating {schedule}", quiet=as_json):
        document = checked_schedule(schedule)
        profile = machine_of(document, machine)
        timeline = api.simulate(document, profile)
    summary = summarize(document, timeline, profile)
    if output is not None:
        write_document(timeline, output)
    if as_json:
        more = {"simulated_on": profile.name, "utilization": timeline.utilization}
        print_json(summary.model_dump() | describe(document) | more)
    else:
        print_report(
            f"Simulated on {profile.name}:",
            summary_table(summary, document, profile.name),
            utilization_table(timeline),
        )
        if output is not None:
            print_report(f"Wrote the timeline to {output}.")
