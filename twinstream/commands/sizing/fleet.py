"""`fleet`: which of many jobs runs on which nodes with which layout, and when."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments.options import Json
from twinstream.commands.arguments.outputs import check_output, output_option
from twinstream.commands.output import print_json, print_report, progress
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_text

_DATA_PARALLEL = "data parallel alone"


def fleet(
    jobs: Annotated[
        Path, typer.Argument(metavar="JOBS.toml", help="The cluster, and a [[jobs]] for each run.")
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="dp", help="Beside it a plan with data parallelism alone."),
    ] = None,
    plays: Annotated[
        int,
        typer.Option(
            min=1, max=10_000, metavar="N",
            help="How often it is played with failures, with the seeds 0, 1, ...",
        ),
    ] = 20,
    output: Annotated[Path | None, output_option("Write the calendar as CSV here.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page here.", callback=check_output),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Plan many jobs on a cluster: which runs on which nodes with which layout, and when.

    Says makespan, deadlines and money, beside bounds that no plan can beat, and plays failures.
    """
    from twinstream.fleet.jobs import FleetError, load_fleet
    from twinstream.fleet.page import fleet_csv, fleet_html
    from twinstream.fleet.plan import FleetPlan, plan_fleet
    from twinstream.fleet.rates import data_parallel, predicted_speed
    from twinstream.fleet.screen import fleet_screen

    if against not in (None, "dp"):
        raise FleetError(f"--against '{against:.40}' is unknown; known: dp")
    asked = load_fleet(jobs)
    predict = partial(predicted_speed, asked.cluster)
    plans, refused = dict[str, FleetPlan](), dict[str, str]()
    with progress("predicting jobs", len(asked.jobs) * (1 + bool(against)), quiet=as_json) as stage:
        plan = plan_fleet(asked, predict, source=str(jobs), plays=plays, on_job=stage)
        if against is not None:
            name, alone = _DATA_PARALLEL, data_parallel(asked)
            try:
                plans[name] = plan_fleet(
                    alone, predict, source=name, plays=plays, may_be_late=True, on_job=stage
                )
            except TwinstreamError as error:
                refused[name] = str(error)
    if output is not None:
        write_text(fleet_csv(plan), output)
    if html is not None:
        write_text(fleet_html(plan, plans), html)
    if as_json:
        print_json({"plan": plan, "beside": plans, "refused": refused})
        return
    print_report(fleet_screen(plan, plans))
    print_report(*refused.values())
    print_report(*(f"Wrote {path}." for path in (output, html) if path is not None))
