"""`run` on ranks: each is a process of this machine, or one of torchrun's."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinstream.clusters.conforms import require_conforming
from twinstream.clusters.running.places import known_place_of
from twinstream.clusters.running.run_ranks import (
    ClusterRun,
    join_as_rank,
    run_processes,
    spec_of,
)
from twinstream.clusters.shared_machine import Place
from twinstream.commands.arguments.backends import UNKNOWN_PEAK
from twinstream.commands.output import print_json, print_report, progress
from twinstream.executor.ranks.torchrun import StartedRank
from twinstream.measures.metrics import Summary, summarize
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.planner import gc_paused
from twinstream.run_settings import RunSettings
from twinstream.schedule.analysis.comparison import by_rank
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import write_document
from twinstream.schedule.timeline import Timeline
from twinstream.screens.ranks_screen import layout_line, stages_table
from twinstream.screens.run_report import losses_line
from twinstream.screens.tables import SHARES, SPEEDS, headline_table
from twinstream.simulator.replay import simulate
from twinstream.trusted_code import require_trusted


@dataclass(frozen=True)
class HowToRun:
    """What of a run on ranks is in no schedule; `cluster` is the profile that predicts it."""

    settings: RunSettings
    cluster: str | None
    tokens: NDArray[np.int32]
    output: Path | None
    as_json: bool


@dataclass(frozen=True)
class _Job:
    """A schedule, and on what it is predicted."""

    schedule: Schedule
    place: Place | None


def run_of_ranks(path: Path, schedule: Schedule, how: HowToRun) -> None:
    """Train by the schedule of ranks in a file; of torchrun's ranks the first one tells.

    Raises:
        TwinstreamError: as `run_processes`, `join_as_rank`.
    """
    spec = spec_of(schedule)
    require_conforming(schedule)
    recipe = Recipe.model_validate(next(iter(schedule.schedules.values())).recipe)
    require_trusted(str(path), spec, recipe, trusts=how.settings.trusts_code)
    _run(_Job(schedule, known_place_of(schedule, how.cluster, None, path)), how)


def _run(job: _Job, how: HowToRun) -> None:
    settings, schedule = how.settings, job.schedule
    found: ClusterRun | None
    if StartedRank.here() is not None:
        found = join_as_rank(schedule, settings, how.tokens)
    else:
        what = f"training {schedule.model['name']} on {schedule.mesh.size} ranks"
        with progress(what, quiet=how.as_json):
            found = run_processes(schedule, settings, how.tokens)
    if found is None:
        return
    try:
        if how.output is not None:
            write_document(found.timeline, how.output)
    finally:  # what was trained is told, on a full disk too
        _report(job, found, as_json=how.as_json)
    if how.output is not None and not how.as_json:
        print_report(f"Wrote the timeline to {how.output}.")


def _predicted(job: _Job, *, quiet: bool) -> Summary | None:
    """What the run should come to; None where nobody knows on what it runs."""
    if job.place is None:
        return None
    machine = job.place.machine
    with progress(f"predicting {job.schedule.model['name']}", quiet=quiet), gc_paused():
        timeline = simulate(job.schedule, machine, job.place.cluster)
        return summarize(job.schedule, timeline, machine)


def _measured(job: _Job, timeline: Timeline) -> Summary:
    """What it came to; of use of compute nothing is shown where the peak is not known."""
    machine = UNKNOWN_PEAK if job.place is None else job.place.machine
    return summarize(*by_rank(job.schedule, timeline), machine)


def _report(job: _Job, run: ClusterRun, *, as_json: bool) -> None:
    schedule, timeline, step_s = job.schedule, run.timeline, run.timeline.step_ns / 1e9
    tokens = schedule.tokens_per_step
    predicted = _predicted(job, quiet=as_json)
    assumed = job.place.assumed if job.place else ""
    if as_json:
        print_json(
            {
                "model": schedule.model["name"],
                "ranks": schedule.mesh.size,
                "layout": schedule.layout,
                "losses": run.losses,
                "step_time_s": step_s,
                "cold_step_time_s": timeline.cold_ns / 1e9,
                "tokens_per_s": tokens / step_s,
                "predicted": predicted,
                "assumed": assumed or None,
                "clock_error_ns": timeline.clock_error_ns,
                "provenance": timeline.provenance,
            }
        )
        return
    print_report(
        layout_line(schedule),
        stages_table(schedule),
        f"{tokens:,} tokens a step:",
        headline_table(
            predicted, _measured(job, timeline), (*SPEEDS, *(SHARES if job.place else ()))
        ),
        losses_line(run.losses),
        f"{timeline.provenance.description.capitalize()}, {timeline.provenance.detail}.",
        *([f"Assumed for the prediction: {assumed}."] if assumed else []),
    )
    if predicted is None:
        print_report("For a prediction give the profile of what this ran on: --cluster FILE.")
