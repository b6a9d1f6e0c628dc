"""`plan --ranks`: lay a model out over processes that can run it, each stage planned."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from twinstream.clusters.executable import Stages, executable
from twinstream.clusters.layout import Layout, LayoutError
from twinstream.commands.arguments.cluster_options import (
    ClusterOptions,
    RanksOptions,
    require_known,
)
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.arguments.requests import request_of
from twinstream.commands.output import print_json, print_report, progress
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.measures.metrics import Summary, summarize
from twinstream.planner.planner import gc_paused
from twinstream.planner.request import PlanRequest
from twinstream.planner.search.chunking import chunkings
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.document import Caps
from twinstream.schedule.files import write_document
from twinstream.schedule.ops import Reduction
from twinstream.schedule.workload import MachineRef, Workload
from twinstream.screens.ranks_screen import ranks_screen, stages_figures
from twinstream.simulator.replay import simulate_cluster
from twinstream.training.ranks.shared_machine import Place, cores_here, place_here

_MICROBATCHES = 4  # for each stage, where tokens per step are open: a bubble of a fifth
_NOT_OF_RANKS = (
    "--policy", "--home", "--recompute", "--prefetch", "--effort", "--optimizer-overhead",
)  # fmt: skip


@dataclass(frozen=True)
class PlannedRanks:
    """What was laid out, the schedule, and the place where it is predicted.

    `seconds` are those of planning.
    """

    stages: Stages
    place: Place
    schedule: ClusterSchedule
    seconds: float

    def summary(self) -> Summary:
        """As it is predicted."""
        machine = self.place.machine
        timeline = simulate_cluster(self.schedule, self.place.cluster, machine)
        return summarize(self.schedule, timeline, machine)


def plan_for_ranks(
    num_ranks: int,
    wanted: PlanOptions,
    asked: ClusterOptions,
    charged: RunOptions,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Plan every stage within the caps of a rank, and write the schedule that ranks run.

    Raises:
        LayoutError: an option is not of ranks that run here, or they cannot be laid out so.
        TwinstreamError: an option is missing, unknown, or cannot be read.
    """
    if beside := [*_not_of_ranks(asked), *charged.given()]:
        raise _refusal(beside)
    found = planned_for_ranks(num_ranks, wanted, asked, asked.cluster, quiet=as_json)
    with progress("simulating", quiet=as_json), gc_paused():
        summary = found.summary()
    try:
        if output is not None:
            write_document(found.schedule, output)
    finally:
        _tell(found, summary, as_json=as_json)
    if output is not None and not as_json:
        print_report(f"Wrote the schedule to {output}; run it: twinstream run {output}")


def planned_for_ranks(
    num_ranks: int, wanted: PlanOptions, asked: RanksOptions, where: str | None, *, quiet: bool
) -> PlannedRanks:
    """A schedule that so many ranks run, each stage planned within the caps of a rank.

    Args:
        where: a cluster, whose nodes are planned for unless a machine is given; without one the
            ranks are on one machine, whose links are assumed.

    Raises:
        LayoutError: an option is not of ranks that run here, or they cannot be laid out so.
        TwinstreamError: an option is missing, unknown, or cannot be read.
    """
    layout = _layout(num_ranks, asked)
    if beside := [flag for flag in wanted.given() if flag in _NOT_OF_RANKS]:
        raise _refusal(beside)
    cluster = None if where is None else load_cluster(where)
    request = _request(wanted, cluster)
    stages = Stages(request.spec, _workload(request, layout), request.recipe, layout)
    caps: Caps = request.caps
    if wanted.host_mem is None and caps.host_bytes is not None:
        # host memory is the machine's, and a rank has its share of it
        caps = caps.model_copy(update={"host_bytes": caps.host_bytes // num_ranks})
    start_s = time.perf_counter()
    with progress(f"planning {num_ranks} ranks", quiet=quiet), gc_paused():
        schedule = executable(stages, request.machine, caps)
    seconds = time.perf_counter() - start_s
    if cluster is None:
        place = place_here(request.machine, num_ranks, cores_here())
    else:
        place = Place(cluster, request.machine)
        made_for = MachineRef(name=cluster.name, content_hash=cluster.name)
        schedule = schedule.model_copy(update={"machine": made_for})
    return PlannedRanks(stages, place, schedule, seconds)


def _request(wanted: PlanOptions, cluster: Cluster | None) -> PlanRequest:
    """For one rank: the machine given, else a node of the cluster."""
    if wanted.machine is not None:
        return request_of(wanted)
    if cluster is None:
        raise LayoutError("--ranks needs --machine (of one rank), or --cluster with its nodes")
    request = request_of(replace(wanted, machine=cluster.machine))
    return replace(request, machine=machine_of(cluster))


def _not_of_ranks(asked: ClusterOptions) -> list[str]:
    """What only layouts have that are predicted."""
    ours = {f"--{field.name.replace('_', '-')}" for field in fields(RanksOptions)}
    return [flag for flag in asked.given() if flag not in ours and flag != "--cluster"]


def _refusal(flags: Sequence[str]) -> LayoutError:
    return LayoutError(f"{', '.join(flags)} is not of ranks that run: leave it out, or --ranks")


def _layout(num_ranks: int, asked: RanksOptions) -> Layout:
    """A pipeline over all ranks, unless the degrees say otherwise."""
    pp, dp = asked.pp, asked.dp
    if pp is None:
        pp = num_ranks // (dp or 1)
    if dp is None:
        dp = num_ranks // pp
    if not pp or pp * dp != num_ranks:
        raise LayoutError(f"pp {pp} x dp {dp} are not the {num_ranks} ranks of --ranks")
    virtual = asked.virtual_stages or 1
    fields: dict[str, Any] = {
        "pp": pp, "dp": dp, "virtual_stages": virtual, "zero": asked.zero or 0,
        "reduction": asked.reduction or "rank_order",
        "pipeline": asked.pipeline or ("interleaved" if virtual > 1 else "1f1b"),
    }  # fmt: skip
    if fields["pipeline"] not in _PIPELINES:
        raise LayoutError(
            f"--pipeline '{fields['pipeline']}' is none that ranks run; these are: "
            f"{', '.join(_PIPELINES)}"
        )
    require_known("--reduction", asked.reduction, get_args(Reduction))
    if virtual > 1 and fields["pipeline"] in ("gpipe", "1f1b"):
        raise LayoutError(
            f"--virtual-stages {virtual} is of the pipelines interleaved and ring, not of "
            f"{fields['pipeline']}"
        )
    return Layout(**fields)


_PIPELINES = ("gpipe", "1f1b", "interleaved", "ring")


def _workload(request: PlanRequest, layout: Layout) -> Workload:
    """Of one replica. A microbatch is a round: as few whole sequences as a chunk allows."""
    step = request.step
    tokens = step.tokens_per_step
    if tokens is not None:
        if tokens % layout.dp:
            raise LayoutError(f"{tokens} tokens per step are not the same for {layout.dp} replicas")
        tokens //= layout.dp
    chunk = step.chunk_tokens or step.pack_tokens
    chunks = step.chunks_per_round or max(1, step.pack_tokens // chunk)
    if tokens is None:
        tokens = chunk * chunks * _MICROBATCHES * layout.pp
    return chunkings(
        request.spec,
        replace(step, tokens_per_step=tokens, chunk_tokens=chunk, chunks_per_round=chunks),
    )[0]


def _tell(found: PlannedRanks, summary: Summary, *, as_json: bool) -> None:
    schedule, place = found.schedule, found.place
    if as_json:
        told = {
            "layout": schedule.layout,
            "workload": found.stages.workload,
            "stages": stages_figures(schedule),
            "predicted": summary,
            "assumed": place.assumed or None,
            "plan_seconds": found.seconds,
        }
        print_json(told)
        return
    workload, name = found.stages.workload, place.cluster.name
    print_report(ranks_screen(schedule, workload, summary, name, found.seconds))
    if place.assumed:
        print_report(f"Assumed for the prediction: {place.assumed}.")
