"""`whatif`: what throughput hangs on, and what would reach a target."""

import os
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.requests import request_of
from twinstream.commands.output import print_json, print_report, progress
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_text
from twinstream.simulator.replay import steady_state
from twinstream.whatif.target import check_target

_MOST_CHANGE = 100.0


class ChangesError(TwinstreamError):
    """Changes that cannot be read."""


@grouped("model", "machine", "seq_len")
def whatif(
    wanted: PlanOptions,
    changes: Annotated[
        str, typer.Option(metavar="LIST", help="How much each property changes.")
    ] = "-50%,-10%,+10%,+100%",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Search the smallest memory or link for 12000tok/s, or for 95% of what compute "
            "alone could do.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; by default one a core.")
    ] = None,
    output: Annotated[Path | None, output_option("Write a page with a tornado chart here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Say what throughput hangs on: plan again with each cap and machine number changed.

    With --target, search the smallest device memory, host memory or link that reaches it. Where
    more of something is not faster by a plan of its own, it has the plan of less.
    """
    if target is not None and output is not None:
        raise ChangesError("-o writes the chart of changes, which --target does not make")
    num_jobs = jobs or os.cpu_count() or 1
    factors = changes_of(changes)
    if target is not None:
        check_target(target)
    planner = Planner(steady_state)
    with progress(f"planning {wanted.model} for {wanted.machine}", quiet=as_json):
        request = planner.prepared(request_of(wanted))
    if not as_json:
        print_report(*wanted.notes)
    if target is not None:
        _search(planner, request, target, num_jobs, as_json=as_json)
    else:
        _vary(planner, request, factors, num_jobs, output, as_json=as_json)


def changes_of(text: str) -> tuple[float, ...]:
    """
    >>> changes_of("-50%, +100%")
    (-0.5, 1.0)

    Raises:
        ChangesError: the text is no such list.
    """
    found = []
    for part in text.split(","):
        try:
            change = float(part.strip().removesuffix("%")) / 100 if "%" in part else float(part)
        except ValueError:
            change = -1.0
        if change >= 1 and "%" not in part:
            raise ChangesError(
                f"the change '{part.strip()}' has no %: write {change:g}% or {100 * change:g}%"
            )
        if not -1.0 < change <= _MOST_CHANGE or change == 0:
            raise ChangesError(
                f"cannot read the change '{part.strip()}'; write a list as -50%,-10%,+10%,+100% "
                "(more than -100%, and not 0)"
            )
        found.append(change)
    if len(set(found)) < len(found):
        raise ChangesError(f"'{text}' names a change twice")
    return tuple(found)


def _vary(
    planner: Planner,
    request: PlanRequest,
    changes: tuple[float, ...],
    num_jobs: int,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from twinstream.whatif.screen import what_if_html, what_if_screen
    from twinstream.whatif.sensitivity import num_plans, what_if

    with progress("planning again", num_plans(request, changes), quiet=as_json) as advance:
        found = what_if(planner, request, changes, num_jobs, advance)
    if output is not None:
        write_text(what_if_html(found, request), output)
    if as_json:
        print_json(found)
        return
    print_report(what_if_screen(found, request))
    if output is not None:
        print_report(f"Wrote {output}.")


def _search(
    planner: Planner, request: PlanRequest, target: str, num_jobs: int, *, as_json: bool
) -> None:
    from twinstream.whatif.screen import target_screen
    from twinstream.whatif.target import num_searches, search_target

    told = "searching what reaches the target (quick plans, then confirmed)"
    with progress(told, num_searches(request), quiet=as_json) as advance:
        found = search_target(planner, request, target, num_jobs, advance)
    if as_json:
        print_json(found)
    else:
        print_report(target_screen(found, request))
