"""`explore`: plans, predictions and what-ifs on a page of this machine's browser."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.options import ClusterIfKnown, Json, Profiles
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.schedule_inputs import inputs_of
from twinstream.planner.planner import gc_paused
from twinstream.study.explore.answers import ExploreError
from twinstream.study.front import require_dash


@dataclass(frozen=True)
class Address:
    """Where the page is served."""

    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to serve at; by default only here.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port.")] = 8050


@dataclass(frozen=True)
class BesideSchedules:
    """Where the schedules ran, and what was measured."""

    cluster: ClusterIfKnown = None
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="What was measured of a schedule; one for each, in their order."
        ),
    ] = None

    def measured_of(self, schedules: Sequence[Path]) -> list[Path | None]:
        """By schedule.

        Raises:
            ExploreError: they are not as many as the schedules.
        """
        if not self.measured:
            return [None for _ in schedules]
        if len(self.measured) != len(schedules):
            raise ExploreError(
                f"there are {len(schedules)} schedules, and {len(self.measured)} --measured: give "
                "what the ranks of each measured, in the same order"
            )
        return list(self.measured)


@grouped()
def explore(  # noqa: PLR0913
    address: Address,
    beside: BesideSchedules,
    schedules: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SCHEDULE", help="To be shown below the plans."),
    ] = None,
    machine: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A TOML profile to offer, too; repeatable."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A Hugging Face config.json to offer; repeatable."),
    ] = None,
    price: Annotated[
        str,
        typer.Option(
            "--price-per-gpu-hour",
            metavar="[NAME=]PRICE,...",
            help="Price of an hour of one GPU, in any currency; or of each machine or cluster, as "
            "h100=2.5,b200=6. A new page begins with it.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Serve a page with model, machines, caps and sequence length as controls; Ctrl-C ends it.

    Below stand the schedules that are given, simulated, with a group of lanes for each class of
    ranks, and what was measured of them.
    """
    measured = beside.measured_of(schedules or [])
    require_dash()
    from twinstream.study.explore.app import serve
    from twinstream.study.explore.clusters import ShownCluster

    shown = []
    for path, ran in zip(schedules or (), measured, strict=True):
        with progress(f"simulating {path}", quiet=as_json), gc_paused():
            given = inputs_of(path, Profiles(cluster=beside.cluster))
            after = given.measured(ran)
            one = ShownCluster(
                path.name, given.schedule, given.timeline(), given.machine, after, given.told
            )
        shown.append(one)

    def tell(url: str) -> None:
        print_json({"url": url}) if as_json else print_report(f"Serving {url}; end with Ctrl-C.")

    serve(
        model or (), machine or (), shown, host=address.host, port=address.port, price=price,
        on_ready=tell,
    )  # fmt: skip
