"""What `train` shows before the first step and after the last, on one device and on ranks."""

from rich.console import Group, RenderableType

from twinstream.measures.explanation import explain
from twinstream.measures.metrics import Summary, rate_text
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import brief
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.live import duration
from twinstream.screens.plan_screen import WIDTH, residence_table
from twinstream.screens.tables import (
    SHARES,
    SPEEDS,
    headline_table,
    readable,
    seconds,
    workload_line,
)
from twinstream.training.preparing import Prepared
from twinstream.training.ranks.planning import RanksPlan
from twinstream.training.ranks.preparing import RanksPrepared
from twinstream.training.ranks.trainer import RanksResult


def train_screen(prepared: Prepared, done: int) -> Group:
    """What a run will do: that it fits, how fast, how long, what limits it, what is where.

    Args:
        done: steps that are behind.
    """
    plan, machine = prepared.plan, prepared.here.machine
    schedule, summary = plan.schedule, prepared.summary
    explanation = explain(schedule, plan.predicted, machine)
    table = FittedTable(box=None, show_header=False, width=WIDTH, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("data", prepared.data_line)
    table.add_row(
        "a step", f"{prepared.tokens_per_step:,} tokens: {workload_line(schedule.workload)}"
    )
    uncertainty = uncertainty_of(machine, schedule)
    speed = f"{rate_text(summary.tokens_per_s)} tokens/s, {seconds(summary.step_time_s)} a step"
    table.add_row("predicted", f"{speed} ({uncertainty.short})")
    table.add_row("MFU", f"{summary.mfu:.1%} of the {schedule.model.spec['dtype']} peak")
    left = max(0, prepared.num_steps - done)
    of = f" of {prepared.num_steps:,}" if done else ""
    table.add_row("to the end", f"{duration(left * summary.step_time_s)}: {left:,}{of} steps")
    table.add_row("limited by", ", ".join(map(readable, explanation.limits)) or "-")
    table.add_row("checkpoint", brief(plan.checkpoint_bytes))
    table.add_row("planned in", seconds(prepared.plan_seconds))
    title = f"{prepared.what} on {machine.name}: it fits"
    return Group(title, table, residence_table(explanation.residence, schedule.caps))


def trained_screen(
    predicted: Summary, measured: Summary | None, lines: list[str], curve: str
) -> list[RenderableType]:
    """Predicted beside measured, the curve of the loss, and what is where."""
    parts: list[RenderableType] = [curve]
    if measured is not None:
        parts.append(headline_table(predicted, measured, (*SPEEDS, *SHARES)))
    return [*parts, *lines]


def ranks_screen(prepared: RanksPrepared, done: int) -> Group:
    """What a run will do: in which layout and why, how fast, how long, what each rank takes.

    Args:
        done: steps that are behind.
    """
    plan, ranks = prepared.plan, prepared.plan.schedule.mesh.size
    table = FittedTable(box=None, show_header=False, width=WIDTH, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("data", prepared.data_line)
    table.add_row("a step", f"{prepared.tokens_per_step:,} tokens: {workload_line(plan.workload)}")
    choice = plan.choice
    table.add_row("layout", f"{choice.chosen}, {choice.why}")
    for other in choice.others:
        table.add_row("", f"not {other}")
    table.add_row(
        "predicted", f"{rate_text(plan.tokens_per_s)} tokens/s, {seconds(plan.step_s)} a step"
    )
    table.add_row("assumed", choice.assumed)
    left = max(0, prepared.num_steps - done)
    of = f" of {prepared.num_steps:,}" if done else ""
    table.add_row("to the end", f"{duration(left * plan.step_s)}: {left:,}{of} steps")
    for name, device_bytes, host_bytes in _memory(plan):
        table.add_row(name, f"{brief(device_bytes)} device, {brief(host_bytes)} host a rank")
    table.add_row("checkpoint", brief(plan.checkpoint_bytes))
    table.add_row("planned in", seconds(prepared.plan_seconds))
    return Group(
        f"{prepared.what} on {ranks} ranks of {prepared.here.machine.name}: it fits", table
    )


def speeds_line(result: RanksResult) -> str:
    """Predicted beside measured."""
    line = f"predicted {rate_text(result.predicted_tokens_per_s)} tokens/s"
    measured = result.measured_tokens_per_s
    if measured is None:
        return line
    ratio = measured / result.predicted_tokens_per_s - 1.0
    return f"{line}, measured {rate_text(measured)} ({ratio:+.0%}; median of steps)"


def ranks_json(prepared: RanksPrepared) -> dict[str, object]:
    """What is predicted, for programs."""
    plan = prepared.plan
    return {
        "layout": plan.layout,
        "candidates": [str(one) for one in plan.candidates],
        "step_time_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "num_steps": prepared.num_steps,
        "tokens_per_step": prepared.tokens_per_step,
        "epoch_tokens": prepared.data.epoch_tokens,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "memory_bytes": {name: {"device": d, "host": h} for name, d, h in _memory(plan)},
        "options": prepared.options,
    }


def _memory(plan: RanksPlan) -> list[tuple[str, int, int]]:
    """By stage, the arenas of a rank."""
    schedules = plan.schedule.schedules
    return [(name, arena_bytes(s, DEVICE), arena_bytes(s, HOST)) for name, s in schedules.items()]
