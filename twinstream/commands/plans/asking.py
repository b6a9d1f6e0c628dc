"""`whatif`: what throughput hangs on, and what would reach a target."""

from pathlib import Path
from typing import Annotated

from twinstream.clusters.layout import LayoutError
from twinstream.commands.arguments import options
from twinstream.commands.arguments.cluster_options import ClusterOptions
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.arguments.requests import request_of
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plans.asking_cluster import ask_on_cluster
from twinstream.commands.plans.asking_options import (
    CHANGES,
    ChangesError,
    WhatIfOptions,
    changes_of,
)
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest
from twinstream.schedule.files import write_text
from twinstream.simulator.replay import steady_state
from twinstream.whatif.target import check_target


@grouped("model", "seq_len")
def whatif(
    wanted: PlanOptions,
    asked: ClusterOptions,
    charged: RunOptions,
    how: WhatIfOptions,
    output: Annotated[Path | None, output_option("Write a page with a tornado chart here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Say what throughput hangs on: plan again with each cap and machine number changed.

    With --target, search the smallest device memory, host memory or link that reaches it. Where
    more of something is not faster by a plan of its own, it has the plan of less.

    With --cluster, links, HBM, compute, memory and GPUs change: the step with the layout that was
    the fastest before, and with the one that is then.
    """
    target = how.target
    if not asked.is_of_one_device(wanted):
        ask_on_cluster(wanted, asked, charged, how, output, as_json=as_json)
        return
    charged.require_possible()
    wanted, machine = asked.one_device(wanted)
    if how.written:
        raise LayoutError("--set is of a cluster; of one machine write a profile with a base")
    if target is not None and output is not None:
        raise ChangesError("-o writes the chart of changes, which --target does not make")
    num_jobs, factors = how.num_jobs, changes_of(how.changes or CHANGES)
    if target is not None:
        check_target(target)
    planner = Planner(steady_state)
    with progress(f"planning {wanted.model} for {machine.name}", quiet=as_json):
        request = planner.prepared(request_of(wanted, machine))
    if not as_json:
        print_report(*wanted.notes)
    if target is not None:
        _search(planner, request, target, num_jobs, as_json=as_json)
    else:
        _vary(planner, request, factors, num_jobs, output, as_json=as_json)


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
