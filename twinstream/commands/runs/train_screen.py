"""What `train` shows before the first step, and what it came to after the last."""

from rich.console import Group, RenderableType
from rich.table import Table

from twinstream.measures.explanation import explain
from twinstream.measures.metrics import Summary, rate_text
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.schedule.document import Schedule
from twinstream.schedule.sizes import brief
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
from twinstream.training.checkpoints import written_names
from twinstream.training.preparing import Prepared


def train_screen(prepared: Prepared, done: int) -> Group:
    """What a run will do: that it fits, how fast, how long, what limits it, what is where.

    Args:
        done: steps that are behind.
    """
    plan, machine = prepared.plan, prepared.here.machine
    schedule, summary = plan.schedule, prepared.summary
    explanation = explain(schedule, plan.predicted, machine)
    table = Table(box=None, show_header=False, width=WIDTH, padding=(0, 2, 0, 0))
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
    table.add_row("checkpoint", brief(checkpoint_bytes(schedule)))
    table.add_row("planned in", seconds(prepared.plan_seconds))
    title = f"{prepared.what} on {machine.name}: it fits"
    return Group(title, table, residence_table(explanation.residence, schedule.caps))


def checkpoint_bytes(schedule: Schedule) -> int:
    """Of weights and optimizer state, on the disk; with adapters of theirs alone."""
    roles = ("parameter", "optimizer_state")
    sizes = {
        tensor.tensor_id: tensor.size_bytes
        for tensor in schedule.tensors
        if tensor.parent is None and tensor.role in roles
    }
    written = written_names(list(sizes), adapters="lora" in schedule.recipe)
    return sum(sizes[name] for name in written)


def trained_screen(
    predicted: Summary, measured: Summary | None, lines: list[str], curve: str
) -> list[RenderableType]:
    """Predicted beside measured, the curve of the loss, and what is where."""
    parts: list[RenderableType] = [curve]
    if measured is not None:
        parts.append(headline_table(predicted, measured, (*SPEEDS, *SHARES)))
    return [*parts, *lines]
