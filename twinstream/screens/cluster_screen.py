"""What is printed of a cluster's step: headlines, and where the time of each class goes."""

from collections.abc import Mapping, Sequence

from rich.console import Group

from twinstream.measures.cluster_summary import ClusterSummary
from twinstream.measures.metrics import rate_text
from twinstream.schedule.analysis.idle import CAUSES, ExposedTime
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import listing_table, readable, seconds

MOST_CLASSES = 16
_SHORT = {"all_ranks": "all", "late_ranks": "late", "transfer": "message"}


def cluster_screen(schedule: ClusterSchedule, summary: ClusterSummary, where: str) -> Group:
    """A step of a cluster: how fast, which memory, what compute waited for."""
    error = [] if summary.uncertainty is None else [summary.uncertainty.sentence]
    return Group(*cluster_lines(schedule, summary, where), "", exposed_table(summary), *error)


def cluster_lines(schedule: ClusterSchedule, summary: ClusterSummary, where: str) -> list[str]:
    """Headlines, one a line."""
    name = schedule.model.get("name", "a model")
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in schedule.mesh.axes)
    fullest, error = summary.fullest, summary.uncertainty
    taken = sum(summary.memory_bytes[fullest].values())
    lines = [
        f"{name} on {summary.num_gpus:,} {summary.devices} of {where}: {mesh}",
        f"{summary.tokens_per_step:,} tokens a step in {seconds(summary.step_time_s)} (cold "
        f"{seconds(summary.cold_step_time_s)}): {rate_text(summary.tokens_per_s)} tokens/s"
        f"{'' if error is None else f' ({error.short})'}, MFU {summary.mfu:.1%}",
        f"device memory: {gib(taken)} in class '{fullest}', the fullest"
        + ("" if summary.device_bytes is None else f"; a device has {gib(summary.device_bytes)}"),
    ]
    if host_bytes := max(summary.host_bytes.values()):
        lines.append(f"host memory: {gib(host_bytes)} for the rank that takes most")
    if summary.missing_bytes:
        lines.append(f"It does not fit: {gib(summary.missing_bytes)} are missing.")
    return lines


def exposed_table(summary: ClusterSummary) -> Group:
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
