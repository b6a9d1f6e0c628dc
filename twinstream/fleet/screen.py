"""A fleet's plan on the terminal: jobs, what no plan can beat, what failures do."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType

from twinstream.fleet.failures import FailureStudy
from twinstream.fleet.jobs import HOUR_S
from twinstream.fleet.plan import FleetPlan, PlannedJob
from twinstream.screens.layout_screen import money_text
from twinstream.screens.tables import listing_table

JOB_COLUMNS = ("job", "nodes", "layout", "tokens/s", "start h", "end h", "deadline h", "outcome")


def fleet_screen(plan: FleetPlan, beside: Mapping[str, FleetPlan] | None = None) -> Group:
    """One plan; `beside` are plans of the same jobs under other rules, by their names."""
    table = listing_table(JOB_COLUMNS[:3], JOB_COLUMNS[3:])
    for job in plan.jobs:
        for row in job_rows(plan, job):
            table.add_row(*row)
    parts: list[RenderableType] = [title_of(plan), "", table, "", *notes_of(plan)]
    if beside:
        plans = {"layouts searched": plan, **beside}
        compared = listing_table(("",), tuple(plans))
        for name, *texts in compared_rows(list(plans.values())):
            compared.add_row(name, *texts)
        parts += ["", compared]
    return Group(*parts)


def title_of(plan: FleetPlan) -> str:
    """The fleet in a line."""
    nodes = f"{plan.nodes:,} nodes of {plan.cluster}, {plan.gpus_per_node:,} GPUs each"
    return f"{len(plan.jobs):,} jobs on {nodes}; first {plan.objective}"


def job_rows(plan: FleetPlan, job: PlannedJob) -> list[list[str]]:
    """A row for each stretch of a job; what is of the whole job stands in the first and last."""
    own = [one for one in plan.calendar if one.job == job.name]
    rows = []
    for place, one in enumerate(own):
        speed = next(speed for speed in job.speeds if speed.nodes == len(one.nodes))
        error = " +/- ?" if speed.error is None else f" +/- {speed.error:.0%}"
        is_last = one is own[-1]
        deadline = "-" if job.deadline_s is None else f"{job.deadline_s / HOUR_S:,.2f}"
        rows.append(
            ["" if place else job.name, nodes_text(one.nodes), speed.layout,
             f"{speed.tokens_per_s:,.0f}{error}", _hours(one.start_s), _hours(one.end_s),
             deadline if is_last else "", (job.outcome or "-") if is_last else "resized"]
        )  # fmt: skip
    return rows


def notes_of(plan: FleetPlan) -> list[str]:
    """Makespan, deadlines and money with their bounds, and what failures make of them."""
    bounds, late = plan.bounds, plan.latest_makespan_s
    span = f"{_hours(plan.makespan_s)} h"
    if plan.earliest_makespan_s is not None and late is not None:
        span += f" ({_hours(plan.earliest_makespan_s)} to {_hours(late)} by the error of speeds)"
    gap = plan.makespan_s / bounds.makespan_s - 1
    notes = [
        f"makespan     {span}; no plan ends before {_hours(bounds.makespan_s)} h: {gap:.1%} above",
        f"deadlines    {plan.deadlines_met} of {plan.deadlines} met; no plan meets more than "
        f"{bounds.deadlines_met}",
        f"mean end     {_hours(plan.mean_end_s)} h; nodes are busy {plan.busy_share:.0%} of the "
        "time",
        f"GPU-hours    {plan.gpu_hours:,.0f}; no plan takes fewer than "
        f"{bounds.node_seconds / HOUR_S * plan.gpus_per_node:,.0f}",
    ]
    if plan.money is not None:
        price = f"{plan.price_per_gpu_hour:,.2f} a GPU-hour"
        notes.append(f"money        {money_text(plan.money)} at {price}, of nodes that jobs hold")
    if plan.played is not None:
        notes.append(_failures_note(plan.played, plan.deadlines))
    best = "No plan in which jobs keep their nodes is better: all were tried."
    some = "Not all plans were tried: a better one may be within the bounds."
    return [*notes, best if plan.is_best else some]


def _failures_note(played: FailureStudy, deadlines: int) -> str:
    risky = {name: share for name, share in played.met_share.items() if share < 1}
    told = ", ".join(f"{name} in {share:.0%}" for name, share in risky.items())
    return (
        f"failures     {played.failures:.1f} a play: makespan {_hours(played.makespan_s)} h "
        f"({_hours(played.least_makespan_s)} to {_hours(played.most_makespan_s)}), "
        f"{played.deadlines_met:.1f} of {deadlines} deadlines "
        f"({played.least_deadlines_met} to {played.most_deadlines_met}), {played.plays} plays"
        + (f"; met by {told}" if told else "")
    )


def compared_rows(plans: Sequence[FleetPlan]) -> list[list[str]]:
    """Deadlines, makespan, mean end, GPU-hours and money of several plans, by row."""
    rows = {
        "deadlines met": [f"{plan.deadlines_met} of {plan.deadlines}" for plan in plans],
        "makespan, h": [_hours(plan.makespan_s) for plan in plans],
        "mean end, h": [_hours(plan.mean_end_s) for plan in plans],
        "GPU-hours": [f"{plan.gpu_hours:,.0f}" for plan in plans],
        "money": ["-" if plan.money is None else money_text(plan.money) for plan in plans],
    }
    return [[name, *texts] for name, texts in rows.items()]


def nodes_text(nodes: Sequence[int]) -> str:
    """
    >>> nodes_text((0, 1, 2, 5))
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for node in nodes:
        if runs and node == runs[-1][-1] + 1:
            runs[-1].append(node)
        else:
            runs.append([node])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR_S:,.2f}"
