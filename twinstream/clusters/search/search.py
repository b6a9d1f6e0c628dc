"""The fastest layout of a model and batch on so many GPUs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinstream.clusters.kernel_sets import run_refusal, with_kernels
from twinstream.clusters.predict import (
    Prediction,
    predicted_alone,
    schedule_alone,
    without_reduction,
)
from twinstream.clusters.refusals import require_possible
from twinstream.clusters.search.bounds import Bounds, BoundTables, Recomputed
from twinstream.clusters.search.chains import Pricing
from twinstream.clusters.search.shortage import Memory, none_fits
from twinstream.clusters.search.space import SearchSpace, require_axes, told
from twinstream.clusters.search.workers import LayoutTimers
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.models.executable import executor_refusal
from twinstream.models.parallel.job import Job
from twinstream.models.parallel.layout import Layout
from twinstream.planner.kernel_choice import usual_kernels
from twinstream.schedule.document import Schedule
from twinstream.schedule.node import records_html

GIB = 2**30
_MOST_MISFITS = 8  # that may be planned in vain
_MOST_SIMULATED = 60  # with layers as single ops; the next one's bound then is the gap's


@dataclass(frozen=True)
class RankedLayout:
    """A layout that was simulated whole, its job with the kernels that compute it; of one GPU with
    the schedule."""

    job: Job
    bound_s: float
    prediction: Prediction
    schedule: Schedule | None = None

    @property
    def layout(self) -> Layout:
        """That of the job."""
        return self.job.layout


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, fastest first, and what was looked at.

    `least_bound_s`: what no layout that fits can beat, of those in the space. `num_simulated` with
    layers as single ops.
    """

    best: tuple[RankedLayout, ...]
    least_bound_s: float
    num_layouts: int
    num_fit: int
    num_simulated: int

    def records(self) -> list[dict[str, object]]:
        """A row for each of the best layouts, the fastest first."""
        return [
            {
                "layout": told(one.layout), "kernels": one.job.recipe.implementations.vector,
                "step_s": one.prediction.step_s, "tokens_per_s": one.prediction.tokens_per_s,
                "mfu": one.prediction.mfu, "memory_bytes": one.prediction.memory_bytes,
                "host_bytes": one.prediction.host_bytes, "bound_s": one.bound_s,
            }
            for one in self.best
        ]  # fmt: skip

    def __repr__(self) -> str:
        best = self.best[0]
        return (
            f"<SearchResult: {told(best.layout)} is the fastest of {self.num_simulated:,} simulated"
            f" layouts, {best.prediction.step_s:.4g} s a step, {self.gap:.1%} above the bound>"
        )

    def _repr_html_(self) -> str:
        return records_html(repr(self).strip("<>"), self.records())

    @property
    def gap(self) -> float:
        """How far the fastest is above the least bound, as a share of it."""
        return self.best[0].prediction.step_s / self.least_bound_s - 1


def search_layouts(
    job: Job,
    num_gpus: int,
    cluster: Cluster,
    fixed: Mapping[str, Any] | None = None,
    keep: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Bound all layouts, simulate the best looking ones, best first, until none can be better.

    Args:
        job: model, batch and precision; its layout is not looked at.
        fixed: fields of the layout that are not left open.
        keep: how many of the best are simulated whole.

    Raises:
        NoLayoutError: none is possible (every reason once) or none fits (bytes by class).
    """
    fixed = dict(fixed or {})
    require_axes(fixed, num_gpus)
    if num_gpus == 1 and run_refusal(job.shape, job.recipe, _alone(fixed)) is None:
        return _search_alone(job, cluster, fixed)
    cluster = cluster if job.network_reduction else without_reduction(cluster)
    machine = machine_of(cluster)
    if job.recipe.kernels is None and executor_refusal(job.shape) is None:
        chosen = {"kernels": usual_kernels(machine, job.shape)}  # once, not layout by layout
        job = job.model_copy(update={"recipe": job.recipe.model_copy(update=chosen)})
    pricing = Pricing(cluster, machine)
    asked = SearchSpace(job, num_gpus, cluster, pricing, fixed)
    possible = asked.possible()
    progress(f"bounds of {len(possible):,} layouts")
    bounds = BoundTables(job, pricing).of(possible)
    offload = fixed.get("offload")  # None: where nothing fits without
    found: SearchResult | None = None
    for allowed in (False, True) if offload is None else (bool(offload),):
        memory = Memory.of(cluster, machine, num_gpus, offload=allowed)
        found = _ranked(asked, possible, bounds, memory, keep, progress)
        if found is not None:
            return found
    raise none_fits(asked, possible, bounds, memory)


def _ranked(
    asked: SearchSpace, possible: list[Layout], bounds: Bounds, memory: Memory, keep: int,
    progress: Callable[[str], None],
) -> SearchResult | None:  # fmt: skip
    """The best of what fits a memory; None where nothing does."""
    job, pricing = asked.job, asked.pricing
    fits = np.flatnonzero(bounds.memory_bytes <= memory.most_bytes)
    if not len(fits):
        return None
    away_s = memory.away_s(bounds.memory_bytes)
    tables = BoundTables(job, pricing)
    again = Recomputed.of(tables, possible, memory)
    step_s = np.maximum(bounds.step_s + again.step_s, away_s)
    order = fits[np.argsort(step_s[fits], kind="stable")]
    simulated: list[tuple[float, int]] = []
    candidates = [int(number) for number in order[:_MOST_SIMULATED]]
    tried = keep + _MOST_MISFITS  # no more than these are simulated whole
    with LayoutTimers(pricing) as timers:
        while candidates and not _is_beaten(float(step_s[candidates[0]]), simulated, keep):
            progress(f"simulated {len(simulated)} of {len(fits):,} layouts that may fit")
            some, candidates = candidates[: timers.width], candidates[timers.width :]
            ranked = sorted(simulated)
            most_s = ranked[tried - 1][0] if len(ranked) >= tried else math.inf
            more_s = {n: float(away_s[n] + again.step_s[n]) for n in some}
            asked_s = []
            for n in some:
                layout = again.without(possible[n])
                one = with_kernels(job.model_copy(update={"layout": layout}), pricing.machine)
                asked_s.append((one, most_s - more_s[n]))
            for n, found_s in zip(some, timers.folded_s(asked_s, len(candidates)), strict=True):
                if _is_beaten(float(step_s[n]), simulated, keep):
                    break
                simulated.append((found_s + more_s[n], n))
        layouts = [
            (possible[n].model_copy(update={"offload": memory.offload}), float(step_s[n]))
            for _, n in sorted(simulated)
        ]
        best = _whole(job, layouts, timers, keep, progress)
    if not best:
        return None
    return SearchResult(best, float(step_s[order[0]]), len(possible), len(fits), len(simulated))


def _is_beaten(bound_s: float, simulated: list[tuple[float, int]], keep: int) -> bool:
    """Whether a layout of this bound, and so all behind it, cannot be the best."""
    return len(simulated) >= keep and bound_s >= min(simulated)[0]


def _alone(fixed: Mapping[str, Any]) -> Layout:
    """The layout of one GPU, with what is fixed of it."""
    names = ("micro_batch", "recompute", "offload")
    found: dict[str, Any] = {"zero": 0, "recompute": "auto", "offload": True}
    return Layout(**found | {name: fixed[name] for name in names if name in fixed})


def _search_alone(job: Job, cluster: Cluster, fixed: Mapping[str, Any]) -> SearchResult:
    """One GPU is a mesh of one: its plan is that of the machine, which cuts the step itself."""
    machine = machine_of(cluster)
    job = with_kernels(job.model_copy(update={"layout": _alone(fixed)}), machine)
    require_possible(job, 1)
    is_fixed = "micro_batch" in fixed
    chunk_tokens = job.layout.micro_batch * job.seq_len if is_fixed else None
    schedule = schedule_alone(job, machine, chunk_tokens)
    micro_batch = max(1, schedule.workload.chunk_tokens // job.seq_len)
    layout = job.layout.model_copy(update={"micro_batch": micro_batch})
    job = job.model_copy(update={"layout": layout})
    bound_s = schedule.bound.step_s if schedule.bound is not None else 0.0
    found = RankedLayout(job, bound_s, predicted_alone(job, schedule, machine), schedule)
    return SearchResult((found,), bound_s, 1, 1, 1)


def _whole(
    job: Job, ranked: list[tuple[Layout, float]], timers: LayoutTimers, keep: int,
    progress: Callable[[str], None],
) -> tuple[RankedLayout, ...]:  # fmt: skip
    """The best of what was simulated folded, whole; what then does not fit is left out."""
    found: list[RankedLayout] = []
    left = ranked[: keep + _MOST_MISFITS]
    while left and len(found) < keep and not any(one.prediction.is_offloaded for one in found):
        width = 1 if left[0][0].offload else timers.width  # such a plan takes a minute
        some, left = left[:width], left[width:]
        progress(f"simulating whole: {told(some[0][0])}")
        jobs = [job.model_copy(update={"layout": layout}) for layout, _ in some]
        timed = timers.predictions(jobs, min(len(left), keep - len(found)))
        for (_, bound_s), one in zip(some, timed, strict=True):
            if one is not None and one[1].fits and len(found) < keep:
                found.append(RankedLayout(one[0], bound_s, one[1]))
    return tuple(sorted(found, key=lambda one: one.prediction.step_s))
