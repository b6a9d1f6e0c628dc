"""`plan`: decide where every tensor lives, and predict what that yields."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
from rich.constrain import Constrain

from twinstream.clusters.kernel_sets import why_schedule_not_here
from twinstream.clusters.layout import LayoutError
from twinstream.commands.arguments import options
from twinstream.commands.arguments.cluster_options import ClusterOptions
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import checked_schedule
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.arguments.requests import request_of
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plan_many import plan_for_ranks, plan_on_cluster
from twinstream.documents import simulate
from twinstream.measures.explanation import explain
from twinstream.measures.metrics import summarize
from twinstream.measures.policies_compared import ALL, NoPolicyFits, compare_policies
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.models.kernel_costs.attention_limits import nondeterministic_kernels
from twinstream.planner.choices import OPEN, ChoiceError
from twinstream.planner.planner import Planner
from twinstream.planner.policies import compared_names, policy_named
from twinstream.planner.request import PlanRequest
from twinstream.planner.warm_start import WarmStartError
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import write_document
from twinstream.screens.layout_screen import bills_screen
from twinstream.screens.plan_screen import WIDTH, plan_notes, plan_screen, policies_screen
from twinstream.simulator.replay import steady_state

Ranks = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Plan a pipeline (--pp) and replicas of it (--dp) that so many processes run "
        "(`run`); caps are of one of them, tokens per step of all.",
        rich_help_panel="On a cluster",
    ),
]


@grouped("model", "seq_len")
def plan(  # noqa: PLR0913
    wanted: PlanOptions,
    asked: ClusterOptions,
    charged: RunOptions,
    warm_start: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A schedule of the same step, for less memory or a slower machine, that is the "
            "answer where nothing faster is found: without it more memory may give a slower plan, "
            "by at most the gap that is printed. May be given again.",
            rich_help_panel="What to plan",
        ),
    ] = None,
    ranks: Ranks = None,
    output: Annotated[Path | None, output_option("Write the schedule here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Plan a training step within memory caps and predict its speed.

    On one device of a --machine or --cluster, or on --gpus N of them: with --cluster all layouts
    are searched, with --machine (or --ranks N) those that twinstream runs.
    """
    is_alone = ranks is None and asked.is_of_one_device(wanted)
    if warm_start and not is_alone:
        raise LayoutError("--warm-start is of one device; leave it out")
    if ranks is None and asked.is_of_ranks(wanted):
        ranks = asked.gpus
    if ranks is not None:
        plan_for_ranks(ranks, wanted, asked, charged, output, as_json=as_json)
        return
    if not is_alone:
        plan_on_cluster(wanted, asked, charged, output, as_json=as_json)
        return
    charged.require_possible()
    wanted, machine = asked.one_device(wanted)
    first, *own = (wanted.policy or "").split(",")
    if first == ALL:
        request = request_of(replace(wanted, policy=None), machine)
        if request.choices != OPEN or warm_start:
            raise ChoiceError(
                f"--policy {ALL} compares policies as they are; fix or name plans of one of them"
            )
        _plan_all(request, own, wanted.notes, output, as_json=as_json)
        return
    request = request_of(wanted, machine)
    known = {path: checked_schedule(path) for path in warm_start or []}
    schedule, plan_seconds = planned(request, known, quiet=as_json)
    taken = next((str(path) for path, plan in known.items() if plan.ops is schedule.ops), None)
    try:
        if output is not None:
            write_document(schedule, output)
    finally:  # what was planned is told, on a full disk too
        _tell(request, schedule, plan_seconds, taken, (charged, wanted.notes), as_json=as_json)
    if output is not None and not as_json:
        print_report(f"Wrote the schedule to {output}.")


def planned(
    request: PlanRequest, known: Mapping[Path, Schedule] = MappingProxyType({}), *, quiet: bool
) -> tuple[Schedule, float]:
    """The schedule asked for, and the seconds it took to plan."""
    start_s = time.perf_counter()
    try:
        with progress(f"planning {request.spec.name} for {request.machine.name}", quiet=quiet):
            schedule = Planner(steady_state).plan(request, list(known.values()))
    except WarmStartError as error:
        path = next(path for path, plan in known.items() if plan is error.plan)
        raise WarmStartError(error.plan, f"--warm-start {path}", error.why) from None
    return schedule, time.perf_counter() - start_s


def _tell(
    request: PlanRequest,
    schedule: Schedule,
    plan_seconds: float,
    known_plan: str | None,
    about: tuple[RunOptions, Sequence[str]],
    *,
    as_json: bool,
) -> None:
    machine, (charged, notes) = request.machine, about
    with progress("simulating", quiet=as_json):
        timeline = simulate(schedule, machine)
    notes = [*notes, *plan_notes(schedule, machine, timeline)]
    bill = charged.bill(schedule.workload.tokens_per_step * 1e9 / timeline.step_ns, num_gpus=1)
    if as_json:
        more: dict[str, object] = {} if bill is None else {"bill": bill}
        more |= {
            "explanation": explain(schedule, timeline, machine),
            "known_plan": known_plan,
            "notes": notes,
            "uncertainty": uncertainty_of(machine, schedule),
        }
        summary = summarize(schedule, timeline, machine, plan_seconds)
        print_json(summary.model_dump() | describe(schedule) | more)
        return
    print_report(plan_screen(schedule, timeline, machine, plan_seconds), *_narrow(notes))
    if bill is not None:
        print_report(bills_screen([f"1 {machine.name}"], [bill], charged.num_tokens))
    if known_plan is not None:
        print_report(f"Nothing faster than {known_plan} was found: this is that plan.")


def _plan_all(
    request: PlanRequest, own: Sequence[str], notes: Sequence[str], output: Path | None, *,
    as_json: bool,
) -> None:  # fmt: skip
    """Compare the policies; fails only where none fits."""
    for name in own:
        policy_named(name)  # raises before any is planned
    what = f"planning {request.spec.name} for {request.machine.name} by every policy"
    try:
        with progress(what, len(compared_names(own)), quiet=as_json) as advance:
            compared = compare_policies(request, own, on_policy=advance)
    except NoPolicyFits as error:
        if as_json:
            print_json({"policies": error.outcomes, "best": None})
        raise
    best = compared.best
    if output is not None:
        write_document(best, output)
    notes = [*notes, *plan_notes(best, request.machine, compared.best_timeline)]
    uncertainty = uncertainty_of(request.machine, best)
    if as_json:
        found = {"policies": compared.outcomes, "best": best.policy, "notes": notes}
        print_json(found | {"best_schedule": describe(best), "uncertainty": uncertainty})
        return
    print_report(policies_screen(compared.outcomes, best, uncertainty), *_narrow(notes))
    if output is not None:
        print_report(f"Wrote the schedule of {best.policy} to {output}.")


def _narrow(notes: Sequence[str]) -> list[Constrain]:
    """As wide as the screen above them."""
    return [Constrain(note, WIDTH) for note in notes]


def describe(schedule: Schedule) -> dict[str, object]:
    """What a schedule is about, for JSON."""
    return {
        "model": schedule.model.name,
        "machine": schedule.machine.name,
        "policy": schedule.policy,
        "kernels": schedule.recipe.get("kernels"),
        "recipe": schedule.recipe,
        "runs_here": (why := why_schedule_not_here(schedule)) is None,
        "why_not_here": why,
        "nondeterministic": nondeterministic_kernels(schedule),
        "num_ops": len(schedule.ops),
        "workload": schedule.workload,
        "caps": schedule.caps,
        "bound": schedule.bound,
    }
