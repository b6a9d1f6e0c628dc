"""`run` of a cluster's schedule: each rank a process of this machine, or one of torchrun's."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinstream import api
from twinstream.clusters.conforms import require_conforming_cluster
from twinstream.clusters.running.run_ranks import (
    ClusterRun,
    RankSettings,
    join_as_rank,
    run_processes,
    spec_of,
    started_by_torchrun,
)
from twinstream.commands.cluster_inputs import ClusterInputError, read_cluster
from twinstream.commands.output import print_json, print_report, progress
from twinstream.measures.metrics import rate_text
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.files import write_document
from twinstream.screens.tables import losses_line, seconds


def run_cluster_file(
    path: Path, settings: api.RunSettings, num_ranks: int | None,
    tokens: NDArray[np.int32], output: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Train by the cluster's schedule in a file; of torchrun's ranks the first one tells.

    Raises:
        ClusterInputError: an option is of one device alone, or another number of ranks is asked.
        TwinstreamError: as `run_processes`, `join_as_rank`.
    """
    schedule = read_cluster(path)
    _require_runnable(schedule, settings, num_ranks)
    how = RankSettings(
        settings.num_steps, settings.learning_rate, settings.seed, settings.poison,
        settings.timed_steps, settings.backend,
    )  # fmt: skip
    found: ClusterRun | None
    if started_by_torchrun():
        found = join_as_rank(schedule, how, tokens)
    else:
        what = f"training {schedule.model['name']} on {schedule.mesh.size} ranks"
        with progress(what, quiet=as_json):
            found = run_processes(schedule, how, tokens)
    if found is None:
        return
    try:
        if output is not None:
            write_document(found.timeline, output)
    finally:  # what was trained is told, on a full disk too
        _report(schedule, found, as_json=as_json)
    if output is not None and not as_json:
        print_report(f"Wrote the timeline to {output}.")


def _require_runnable(
    schedule: ClusterSchedule, settings: api.RunSettings, num_ranks: int | None
) -> None:
    spec_of(schedule)
    require_conforming_cluster(schedule)
    size = schedule.mesh.size
    if num_ranks not in (None, size):
        raise ClusterInputError(
            f"the schedule is of {size} ranks, and --ranks {num_ranks} were asked for: leave it "
            "out, or plan with as many"
        )
    if settings.graphs == "on" or settings.nvtx:
        raise ClusterInputError("--graphs on and --nvtx are of one device: leave them out")


def _report(schedule: ClusterSchedule, run: ClusterRun, *, as_json: bool) -> None:
    timeline, step_s = run.timeline, run.timeline.step_ns / 1e9
    tokens = schedule.seq_len * schedule.global_batch
    if as_json:
        print_json(
            {
                "model": schedule.model["name"],
                "ranks": schedule.mesh.size,
                "losses": run.losses,
                "step_time_s": step_s,
                "cold_step_time_s": timeline.cold_ns / 1e9,
                "tokens_per_s": tokens / step_s,
                "clock_error_ns": timeline.clock_error_ns,
                "provenance": timeline.provenance,
            }
        )
        return
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in schedule.mesh.axes)
    print_report(
        f"{schedule.model['name']} on {schedule.mesh.size} ranks: {mesh}",
        f"{tokens:,} tokens a step in {seconds(step_s)} (cold {seconds(timeline.cold_ns / 1e9)}): "
        f"{rate_text(tokens / step_s)} tokens/s",
        losses_line(run.losses),
        f"{timeline.provenance.told.capitalize()}, {timeline.provenance.detail}.",
    )
