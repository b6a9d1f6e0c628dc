"""The fastest layout of a model and batch on so many GPUs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from twinstream.clusters.job import Job
from twinstream.clusters.layout import Layout
from twinstream.clusters.offloading.errors import OffloadError
from twinstream.clusters.predict import Prediction, predict, without_reduction
from twinstream.clusters.search.bounds import BoundTables
from twinstream.clusters.search.chains import Pricing
from twinstream.clusters.search.folded import folded_step_s
from twinstream.clusters.search.shortage import Memory, none_fits
from twinstream.clusters.search.space import Asked, require_axes, told
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster

GIB = 2**30
_MOST_SIMULATED = 60  # with layers as single ops; the next one's bound then is the gap's


@dataclass(frozen=True)
class Found:
    """A layout that was simulated whole."""

    layout: Layout
    bound_s: float
    prediction: Prediction


@dataclass(frozen=True)
class Searched:
    """The best layouts, fastest first, and what was looked at.

    `least_bound_s`: what no layout that fits can beat, of those in the space. `num_simulated` with
    layers as single ops.
    """

    best: tuple[Found, ...]
    least_bound_s: float
    num_layouts: int
    num_fit: int
    num_simulated: int

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
) -> Searched:
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
    cluster = cluster if job.network_reduction else without_reduction(cluster)
    machine = machine_of(cluster)
    pricing = Pricing(cluster, machine)
    asked = Asked(job, num_gpus, cluster, pricing, fixed)
    possible = asked.possible()
    progress(f"bounds of {len(possible):,} layouts")
    bounds = BoundTables(job, pricing).of(possible)
    memory = Memory.of(cluster, machine, offload=bool(fixed.get("offload")))
    fits = np.flatnonzero(bounds.memory_bytes <= memory.most_bytes)
    if not len(fits):
        raise none_fits(asked, possible, bounds, memory)
    away_s = memory.away_s(bounds.memory_bytes)
    bounds = replace(bounds, step_s=np.maximum(bounds.step_s, away_s))
    order = fits[np.argsort(bounds.step_s[fits], kind="stable")]
    simulated: list[tuple[float, int]] = []
    for count, number in enumerate(order):
        ranked = sorted(simulated)
        enough = len(ranked) >= keep and bounds.step_s[number] >= ranked[0][0]
        if enough or count >= _MOST_SIMULATED:
            break
        progress(f"simulated {count} of {len(fits):,} layouts that may fit")
        on_device = possible[number].model_copy(update={"offload": False})
        one = job.model_copy(update={"layout": on_device})
        simulated.append((folded_step_s(one, pricing) + float(away_s[number]), int(number)))
    found = [(possible[n], float(bounds.step_s[n])) for _, n in sorted(simulated)]
    best = _whole(job, found, cluster, keep, progress)
    if not best:
        raise none_fits(asked, possible, bounds, memory)
    return Searched(best, float(bounds.step_s[order[0]]), len(possible), len(fits), len(simulated))


def _whole(
    job: Job, ranked: list[tuple[Layout, float]], cluster: Cluster, keep: int,
    progress: Callable[[str], None],
) -> tuple[Found, ...]:  # fmt: skip
    """The best of what was simulated folded, whole; what then does not fit is left out."""
    found: list[Found] = []
    for layout, bound_s in ranked:
        if len(found) >= keep:
            break
        progress(f"simulating whole: {told(layout)}")
        try:
            prediction = predict(job.model_copy(update={"layout": layout}), cluster)
        except OffloadError:
            continue
        if prediction.fits:
            found.append(Found(layout, bound_s, prediction))
    return tuple(sorted(found, key=lambda one: one.prediction.step_s))
