"""`fleet`: which of many jobs runs on which nodes with which layout, and when."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments.options import Json
from twinstream.commands.arguments.outputs import check_output, output_option
from twinstream.commands.arguments.requests import require_known
from twinstream.commands.output import print_json, print_report, progress
from twinstream.schedule.files import write_text

_AGAINST = ("dp",)
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
    from twinstream.fleet.jobs import load_fleet
    from twinstream.fleet.page import fleet_csv, fleet_html
    from twinstream.fleet.plan import FleetPlan, plan_fleet
    from twinstream.fleet.rates import predicted_speed
    from twinstream.fleet.screen import fleet_screen

    if against is not None:
        require_known("--against", against, _AGAINST)
    asked = {"": load_fleet(jobs)}
    if against is not None:
        alone = {"tp": 1, "cp": 1, "pp": 1}
        limited = [
            job.model_copy(update={"layout": {**job.layout, **alone}}) for job in asked[""].jobs
        ]
        asked[_DATA_PARALLEL] = asked[""].model_copy(update={"jobs": tuple(limited)})
    plans: dict[str, FleetPlan] = {}
    count = len(asked[""].jobs) * len(asked)
    with progress("predicting jobs", count, quiet=as_json) as stage:
        for name, one in asked.items():
            predict = partial(predicted_speed, one.cluster)
            plans[name] = plan_fleet(one, predict, source=str(jobs), plays=plays, on_job=stage)
    plan = plans.pop("")
    if output is not None:
        write_text(fleet_csv(plan), output)
    if html is not None:
        write_text(fleet_html(plan, plans), html)
    if as_json:
        print_json({"plan": plan, "beside": plans})
        return
    print_report(fleet_screen(plan, plans))
    print_report(*(f"Wrote {path}." for path in (output, html) if path is not None))
