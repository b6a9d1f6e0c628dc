"""`explore`: plans, predictions and what-ifs on a page of this machine's browser."""

import errno
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.options import ClusterIfKnown, Json, Profiles
from twinstream.commands.cluster_inputs import cluster_inputs
from twinstream.commands.output import print_json, print_report, progress
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_model
from twinstream.planner.planner import gc_paused
from twinstream.schedule.errors import TwinstreamError


class ExploreError(TwinstreamError):
    """The page cannot be served."""


@dataclass(frozen=True)
class Address:
    """Where the page is served."""

    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to serve at; by default only here.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port.")] = 8050


@dataclass(frozen=True)
class BesideSchedules:
    """Where schedules of clusters ran, and what their ranks measured."""

    cluster: ClusterIfKnown = None
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="What ranks of a schedule measured; one for each, in their order."
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
def explore(
    address: Address,
    beside: BesideSchedules,
    schedules: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CLUSTER-SCHEDULE", help="To be shown below the plans."),
    ] = None,
    machine: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A TOML profile to offer, too; repeatable."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A Hugging Face config.json to offer; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve a page with model, machines, caps and sequence length as controls; Ctrl-C ends it.

    Below stand the schedules of clusters that are given, simulated, with a group of lanes a class,
    and what their ranks measured.
    """
    try:
        from werkzeug.serving import run_simple

        from twinstream.study.explore.answers import Answers
        from twinstream.study.explore.app import explorer
        from twinstream.study.explore.clusters import ShownCluster
    except ModuleNotFoundError as error:
        raise ExploreError(
            f"the explorer needs dash ({error.name} is not installed): "
            "pip install 'twinstream[explore]'"
        ) from None
    machines = {load_machine(path).name: str(path) for path in machine or ()}
    # each question says how long its sequences are
    models = {load_model(path, longest=1).name: str(path) for path in model or ()}
    measured = beside.measured_of(schedules or [])
    _require_free(address.host, address.port)
    shown = []
    for path, ran in zip(schedules or (), measured, strict=True):
        with progress(f"simulating {path}", quiet=as_json), gc_paused():
            given = cluster_inputs(path, Profiles(cluster=beside.cluster))
            one = ShownCluster(
                path.name, given.schedule, given.timeline(), given.machine, given.measured(ran),
                given.told,
            )  # fmt: skip
        shown.append(one)
    app = explorer(Answers(models, machines), shown, address.host)
    url = f"http://{address.host}:{address.port}/"
    if as_json:
        print_json({"url": url})
    else:
        print_report(f"Serving {url}; end with Ctrl-C.")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every request
    run_simple(address.host, address.port, app.server, threaded=True)


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        # Python appends the address to what the system says.
        why = str(error.strerror or error).partition(" (while")[0]
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ExploreError(
            f"cannot serve at {host}:{port}: {why}; choose another {option}"
        ) from None
