"""What is printed of a schedule that ranks run: the layout, and what each stage takes."""

from rich.console import Group

from twinstream.measures.cluster_summary import ClusterSummary
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Copy
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.workload import Workload
from twinstream.screens.cluster_screen import cluster_screen
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import listing_table, seconds, workload_line


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


def stages_figures(schedule: ClusterSchedule) -> list[StageFigures]:
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


def stages_table(schedule: ClusterSchedule) -> FittedTable:
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


def layout_line(schedule: ClusterSchedule) -> str:
    """Model, ranks, mesh and pipeline."""
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in schedule.mesh.axes)
    name, pipeline = schedule.model["name"], schedule.layout["pipeline"]
    return f"{name} on {schedule.mesh.size} ranks: {mesh}, {pipeline}"


def ranks_screen(
    schedule: ClusterSchedule,
    workload: Workload,
    summary: ClusterSummary,
    where: str,
    plan_seconds: float,
) -> Group:
    """The layout, a row for each stage, and what is predicted on the cluster `where`."""
    lines = [
        f"{layout_line(schedule)}; planned in {seconds(plan_seconds)}",
        f"A replica's step: {workload_line(workload)}",
    ]
    return Group(*lines, stages_table(schedule), cluster_screen(schedule, summary, where))
