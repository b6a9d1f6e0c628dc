"""What is printed of the ranks of a mesh: headlines, stages, where the step goes, errors."""

from collections.abc import Mapping, Sequence

from rich.console import Group

from twinstream.measures.metrics import Summary
from twinstream.schedule.analysis.idle import CAUSES, ExposedTime
from twinstream.schedule.document import Schedule
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Copy
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import gib, rate_text
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.workload import Workload
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import (
    listing_table,
    readable,
    seconds,
    workload_line,
)

MOST_CLASSES = 16
_SHORT = {"all_ranks": "all", "late_ranks": "late", "transfer": "message"}


def mesh_screen(schedule: Schedule, summary: Summary, where: str) -> Group:
    """A step of a mesh: how fast, which memory, what compute waited for."""
    error = [] if summary.uncertainty is None else [summary.uncertainty.sentence]
    return Group(*mesh_lines(schedule, summary, where), "", exposed_table(summary), *error)


def mesh_lines(schedule: Schedule, summary: Summary, where: str) -> list[str]:
    """Headlines, one a line."""
    name = schedule.model.get("name", "a model")
    fullest, error = summary.fullest, summary.uncertainty
    lines = [
        f"{name} on {summary.counted} of {where}: {mesh_text(schedule)}",
        f"{summary.tokens_per_step:,} tokens a step in {seconds(summary.step_time_s)} (cold "
        f"{seconds(summary.cold_step_time_s)}): {rate_text(summary.tokens_per_s)} tokens/s"
        f"{'' if error is None else f' ({error.short})'}, MFU {summary.mfu:.1%}",
        f"device memory: {gib(summary.device_peak_bytes)} in class '{fullest}', the fullest"
        + ("" if summary.device_bytes is None else f"; a device has {gib(summary.device_bytes)}"),
    ]
    if summary.host_peak_bytes:
        lines.append(f"host memory: {gib(summary.host_peak_bytes)} for the rank that takes most")
    if summary.missing_bytes:
        lines.append(f"It does not fit: {gib(summary.missing_bytes)} are missing.")
    return lines


def exposed_table(summary: Summary) -> Group:
    """Share of the step by cause for each class, at most 16, and the mean over all ranks."""
    found = summary.exposed
    causes = causes_shown(found)
    heads = (_SHORT.get(cause, readable(cause)) for cause in causes)
    table = listing_table(("class",), ("ranks", "compute", *heads))
    table.padding = (0, 1, 0, 0)
    for column in table.columns[1:]:
        column.no_wrap = True  # names of classes wrap where there are many causes
    for one in found[:MOST_CLASSES]:
        table.add_row(one.name, f"{one.num_ranks:,}", *_cells(one.fractions, causes))
    if len(found) > MOST_CLASSES:
        table.add_row(f"and {len(found) - MOST_CLASSES} more", *[""] * (2 + len(causes)))
    table.add_row("mean of ranks", f"{summary.num_gpus:,}", *_cells(summary.mean_fraction, causes))
    told = (
        "Compute waits while an exchange of tp, cp, ep, dp or of all ranks is under way, or a "
        "message of the pipeline; for its peer (bubble), or ranks that are late."
    )
    return Group("Where the step goes, and what compute waits for, % of the step", table, told)


def causes_shown(found: Sequence[ExposedTime]) -> list[str]:
    """Those that took any time, in their order."""
    return [cause for cause in CAUSES if any(cause in one.causes_ns for one in found)]


def _cells(parts: Mapping[str, float], causes: Sequence[str]) -> list[str]:
    """Shares as percentages; - where there is none."""
    return [f"{100 * parts[name]:.1f}" if name in parts else "-" for name in ("compute", *causes)]


class StageFigures(Node):
    """Bytes of a rank's two arenas and caps, and what it copies between them in a step."""

    name: str
    num_ranks: int
    num_ops: int
    device_bytes: int
    device_cap_bytes: int | None
    host_bytes: int
    copied_bytes: int
    recomputes: int


def stages_figures(schedule: Schedule) -> list[StageFigures]:
    """Of every class of ranks."""
    found = []
    for one in schedule.classes:
        part = schedule.of(one)
        sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
        found.append(
            StageFigures(
                name=one.name,
                num_ranks=schedule.num_ranks(one),
                num_ops=len(part.ops),
                device_bytes=arena_bytes(part, DEVICE),
                device_cap_bytes=part.caps.arena_bytes("device"),
                host_bytes=arena_bytes(part, HOST),
                copied_bytes=sum(sizes[op.tensor] for op in part.ops if isinstance(op, Copy)),
                recomputes=sum(op.kind == "compute" and bool(op.label.level) for op in part.ops),
            )
        )
    return found


def stages_table(schedule: Schedule) -> FittedTable:
    """A row for each stage: what a rank of it takes, and what it copies."""
    table = listing_table(
        ("class",), ("ranks", "ops", "device", "cap", "host", "copied a step", "recomputed")
    )
    for one in stages_figures(schedule):
        cap = "none" if one.device_cap_bytes is None else gib(one.device_cap_bytes)
        table.add_row(
            one.name, str(one.num_ranks), f"{one.num_ops:,}", gib(one.device_bytes), cap,
            gib(one.host_bytes), gib(one.copied_bytes), f"{one.recomputes:,}",
        )  # fmt: skip
    return table


def mesh_text(schedule: Schedule) -> str:
    """The axes and their sizes: `pp 2 x dp 4`."""
    return " x ".join(f"{axis.name} {axis.size}" for axis in schedule.mesh.axes)


def layout_line(schedule: Schedule) -> str:
    """Model, ranks, mesh and pipeline."""
    name, pipeline = schedule.model["name"], schedule.layout["pipeline"]
    return f"{name} on {schedule.mesh.size} ranks: {mesh_text(schedule)}, {pipeline}"


def ranks_screen(
    schedule: Schedule,
    workload: Workload,
    summary: Summary,
    where: str,
    plan_seconds: float,
) -> Group:
    """The layout, a row for each stage, and what is predicted on the cluster `where`."""
    lines = [
        f"{layout_line(schedule)}; planned in {seconds(plan_seconds)}",
        f"A replica's step: {workload_line(workload)}",
    ]
    return Group(*lines, stages_table(schedule), mesh_screen(schedule, summary, where))
