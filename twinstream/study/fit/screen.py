"""What cards can do with a model, as tables of the terminal and as a page."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType

from twinstream.measures.metrics import rate_text
from twinstream.report.page import Page, Section, Table, html_of
from twinstream.schedule.document import Caps
from twinstream.schedule.sizes import gib
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.layout_screen import money_text, range_text
from twinstream.screens.tables import readable
from twinstream.study.fit.cells import FitCell, FitTable

_HIGH_MFU = 0.75


def fit_screen(found: FitTable) -> Group:
    """A table for each machine: ways to train, by lengths."""
    parts: list[RenderableType] = [_title(found)]
    for where, _ in _places(found):
        table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        head, *rows = _rows(found, where)
        for at, name in enumerate(head):
            table.add_column(name, justify="right" if at else "left")
        for row in rows:
            table.add_row(*row)
        within = memory_text(found.caps[where])
        parts += ["", f"{where}, within {within}: tokens/s, MFU, memories", table]
    return Group(*parts, "", *_notes(found))


def fit_html(found: FitTable) -> str:
    """The same as a page, with the command of every cell."""
    sections = []
    for where, machine in _places(found):
        head, *rows = _rows(found, where)
        about = f"{found.peaks[machine]}. Plans within {memory_text(found.caps[where])}."
        sections.append(Section(where, about, Table(head, rows)))
    commands = [
        [cell.where, cell.way, _length(cell), cell.command] for cell in found.cells if cell.fits
    ]
    columns = ("machine", "way", "length", "command")
    sections.append(Section("Commands", "What trains so.", Table(columns, commands, 4)))
    return html_of(
        Page(f"What can a card do with {found.model}?", _title(found), [], sections,
             " ".join(_notes(found)))
    )  # fmt: skip


def _title(found: FitTable) -> str:
    data = "" if found.dataset_tokens is None else f"; data of {found.dataset_tokens:,} tokens"
    data += ", each of one byte (--tokenizer bytes)" if found.counts_bytes else ""
    loss = "" if found.loss is None else f", --loss {found.loss}"
    return f"{found.model}{loss}, {found.tokens_per_step:,} tokens a step{data}"


def memory_text(caps: Caps) -> str:
    """Both caps, of which the device's holds context and libraries, too."""
    sizes = ((caps.device_bytes, "device"), (caps.host_bytes, "host"))
    told = [f"{'any' if size is None else gib(size)} of {kind}" for size, kind in sizes]
    return f"{' and '.join(told)} memory"


def _places(found: FitTable) -> list[tuple[str, str]]:
    """Each machine with so many GPUs, and the machine."""
    return list(dict.fromkeys((cell.where, cell.machine) for cell in found.cells))


def _rows(found: FitTable, where: str) -> list[list[str]]:
    """The heads, and a row for each way."""
    cells = [cell for cell in found.cells if cell.where == where]
    lengths = {(cell.with_disk, cell.seq_len, cell.is_own): _length(cell) for cell in cells}
    ways = list(dict.fromkeys(cell.way for cell in cells))
    by_place = {(cell.way, cell.with_disk, cell.seq_len, cell.is_own): cell for cell in cells}
    heads = ["", *lengths.values()]
    return [heads, *([way, *(_text(by_place.get((way, *one))) for one in lengths)] for way in ways)]


def _length(cell: FitCell) -> str:
    told = f"the data's, to {cell.seq_len:,}" if cell.is_own else f"{cell.seq_len:,} tokens"
    return f"{told}\nwith a disk" if cell.with_disk else told


def _text(cell: FitCell | None) -> str:
    """A cell, in a few short lines; of one that is still planned dots."""
    if cell is None:
        return "..."
    if cell.refused:
        return "refused"
    if cell.tokens_per_s is None or cell.mfu is None:
        lacks = ((cell.lacking_device_bytes, "device"), (cell.lacking_host_bytes, "host"))
        told = [f"{gib(size)} more {kind}" for size, kind in lacks if size is not None]
        return "\nor ".join(told) or "no plan found"
    error = " +/- ?" if cell.error is None else f" +/- {cell.error:.0%}"
    lines = [f"{rate_text(cell.tokens_per_s)}{error}", f"MFU {cell.mfu:.0%}"]
    lines.append(f"{gib(cell.device_bytes or 0)}, {gib(cell.host_bytes or 0)}")
    if cell.disk_bytes_a_day:
        lines.append(f"{cell.disk_bytes_a_day / 1e12:,.1f} TB a day")
    if cell.layout:
        lines.append(cell.layout)
    if cell.hours is not None:
        lines.append(f"{range_text(cell.hours, cell.error, lambda hours: f'{hours:,.3g}')} h")
        if cell.money is not None:
            lines.append(f"money {range_text(cell.money, cell.error, money_text)}")
    return "\n".join(lines)


def _notes(found: FitTable) -> Sequence[str]:
    """What is refused and why, what limits, what a checkpoint takes, and one command."""
    notes = list(dict.fromkeys(f"{c.way}: {c.refused}" for c in found.cells if c.refused))
    fitting = [cell for cell in found.cells if cell.tokens_per_s is not None]
    short = [cell for cell in found.cells if not cell.fits and not cell.refused]
    if found.loss is not None and any(cell.hours is not None for cell in fitting):
        notes.append("Hours are without the reference's forward pass over the data.")
    if short:
        notes.append(
            "What does not fit lacks at least so much of one memory, with the other as it is."
        )
    if any(cell.disk_bytes_a_day for cell in fitting):
        notes.append("TB a day are what steps write to the disk, beside checkpoints.")
    kept = {cell.way: cell.kept_in for cell in fitting}
    notes += [f"{way}: {dtypes}." for way, dtypes in kept.items()]
    if any("float32 master" not in one and "bfloat16" in one for one in kept.values()):
        notes.append(
            "Updates are rounded stochastically; there is no float32 master (--optimizer-state "
            "float32_master keeps one)."
        )
    untried = {cell.way: ", ".join(cell.not_on_gpus) for cell in fitting if cell.not_on_gpus}
    if untried:
        told = "; ".join(f"{way} ({what})" for way, what in untried.items())
        notes.append(f"Not yet run on a GPU, only on CPUs: {told}.")
    limits = {cell.way: ", ".join(map(readable, cell.limits)) for cell in fitting if cell.limits}
    if limits:
        told = "; ".join(f"{way}: {limit}" for way, limit in limits.items())
        notes.append(f"Limited, at the longest that fits, by: {told}.")
    saved = [cell for cell in fitting if cell.checkpoint_bytes is not None]
    sizes = {cell.way: gib(cell.checkpoint_bytes or 0) for cell in saved}
    if sizes:
        told = "; ".join(f"{way} {size}" for way, size in sizes.items())
        notes.append(f"A checkpoint takes: {told}.")
    high = [cell.machine for cell in fitting if cell.mfu is not None and cell.mfu > _HIGH_MFU]
    for machine in dict.fromkeys(high):
        notes.append(
            f"MFU on {machine} is of {found.peaks[machine]}. Cards run at higher clocks than "
            "datasheets count with, so that more than people believe can be reached."
        )
    if fitting:
        best = max(fitting, key=lambda cell: cell.tokens_per_s or 0.0)
        notes.append(f"Each cell has its command (--json), the fastest one: {best.command}")
    if any(cell.effort == "quick" for cell in fitting):
        notes.append("Plans are quick ones; --effort normal refines them, by a percent or two.")
    if found.download is not None:
        notes.append(f"Its weights: {found.download}")
    return notes
