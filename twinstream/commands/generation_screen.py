"""Planned generation of text on the screen."""

from rich.console import RenderableType

from twinstream.measures.metrics import rate_text
from twinstream.schedule.sizes import gib
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.plan_screen import WIDTH
from twinstream.screens.tables import readable, seconds
from twinstream.study.generation import PlannedGeneration


def generation_screen(found: PlannedGeneration, plan_seconds: float) -> list[RenderableType]:
    """How fast text is generated, in what memory, and what limits it."""
    asked, error = found.generation, found.uncertainty
    bound = found.bound_s
    table = FittedTable(box=None, show_header=False, width=WIDTH, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("first token", f"after {seconds(found.first_token_s)} ({error.short})"),
        ("then", f"{seconds(found.token_s)} a token of each sequence, "
                 f"{rate_text(found.decode_tokens_per_s)} tokens/s in all"),
        ("altogether", f"{rate_text(found.tokens_per_s)} tokens/s, {seconds(found.seconds)} with "
                       "the prompts"),
        ("memory", f"weights {gib(found.weights_bytes)}, keys and values {gib(found.cache_bytes)}"),
    ]  # fmt: skip
    if bound:
        gap = f"{found.seconds / bound - 1:.1%} above it"
        rows.append(("lower bound", f"{seconds(bound)} within these caps; all is {gap}"))
    rows.append(("planned in", seconds(plan_seconds)))
    for name, text in rows:
        table.add_row(name, text)
    passes = FittedTable(box=None, width=WIDTH, padding=(0, 2, 0, 0))
    for column in ("pass", "time", "device", "host", "H2D", "limited by"):
        passes.add_column(column, justify="left" if column in ("pass", "limited by") else "right")
    for name, step in found.steps:
        summary, limits = step.summary, found.limits[name]
        passes.add_row(
            name, seconds(step.step_s), gib(step.device_bytes), gib(step.host_bytes),
            gib(summary.h2d_bytes), ", ".join(map(readable, limits)) or "-",
        )  # fmt: skip
    sequences = "sequence" if asked.batch == 1 else "sequences"
    title = (
        f"{found.model.name} generating on {found.machine.name}: {asked.batch:,} {sequences}, "
        f"{asked.decode:,} tokens behind {asked.prompt:,}"
    )
    return [title, table, "", passes, f"{error.sentence} No profile was fitted to generating text."]
