"""Estimates of layered models as a table of a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Group

from twinstream.layered.estimate import Estimate, Question
from twinstream.layered.step import COLLECTIVES
from twinstream.layered.strategy import strategy_text
from twinstream.models.layered.model import LayeredModel
from twinstream.schedule.sizes import gib, rate_text
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import listing_table

_GIB = 2**30


def estimates_screen(asked: Question, found: Sequence[Estimate]) -> Group:
    """Strategies, fastest first; of the first what takes its time and its memory."""
    table = FittedTable(box=box.SIMPLE, pad_edge=False)
    for name in ("", "step ms", "+/-", "samples/s", "memory GiB", "compute ms", "exposed ms"):
        table.add_column(name, justify="right" if name else "left")
    for number, one in enumerate(found, 1):
        table.add_row(
            str(number),
            f"{one.step.step_ns / 1e6:,.2f}",
            one.error_text.removeprefix("+/- "),
            rate_text(one.samples_per_s),
            f"{one.memory.total / _GIB:.1f}",
            f"{one.step.compute_ns / 1e6:,.2f}",
            f"{one.step.exposed_ns / 1e6:,.2f}",
        )
    best, task = found[0], asked.task
    head = (
        f"{asked.model.name} ({asked.model.parameters / 1e9:,.3f} billion parameters) on "
        f"{asked.mesh.gpus:,} GPUs of {asked.cluster.name}, {task.name}, {task.batch:,} samples a "
        "step"
    )
    told = [f"{number}  {_told(one)}" for number, one in enumerate(found, 1)]
    room = "" if best.fits else ": it does NOT fit"
    kinds = ", ".join(
        f"{kind.replace('_', '-')} {best.step.by_kind[kind] / 1e6:,.2f}"
        for kind in ("products", "lookup", *COLLECTIVES)
        if best.step.by_kind[kind]
    )
    memory = ", ".join(f"{name} {gib(size)}" for name, size in best.memory._asdict().items())
    return Group(
        head,
        *told,
        table,
        f"Of 1, ms: {kinds}.",
        f"Of 1, a GPU: {memory}; {gib(best.memory.total)} of {gib(best.room_bytes)}{room}.",
        f"Step times are {best.error_text}: {best.why}.",
    )


def layered_table(models: Sequence[LayeredModel]) -> Group:
    """Models by name, with their size and source."""
    table = listing_table(("name",), ("billion parameters",))
    table.add_column("source", overflow="fold")
    for model in models:
        table.add_row(model.name, f"{model.parameters / 1e9:,.3f}", model.source)
    return Group("Layered models", table)


def _told(one: Estimate) -> str:
    return strategy_text(one.strategy) + (", recompute" if one.task.recompute else "")
