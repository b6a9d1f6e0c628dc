"""The fastest layout of a model and batch on so many GPUs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from twinstream.clusters.kernel_sets import cluster_refusal, run_refusal, with_kernels
from twinstream.clusters.predict import (
    gpu_caps,
    predicted_whole,
    schedule_alone,
    without_reduction,
)
from twinstream.clusters.refusals import require_possible
from twinstream.clusters.search.bounds import Bounds, BoundTables, Recomputed
from twinstream.clusters.search.chains import Pricing
from twinstream.clusters.search.found import RankedLayout, SearchResult
from twinstream.clusters.search.planned import fastest_planned
from twinstream.clusters.search.shortage import Memory, none_fits
from twinstream.clusters.search.space import RunsHere, SearchSpace, require_axes
from twinstream.clusters.search.workers import LayoutTimers
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.planner.kernel_choice import usual_kernels
from twinstream.schedule.document import Caps
from twinstream.simulator.replay import simulate

GIB = 2**30
_MOST_MISFITS = 8  # that may be planned in vain
_OF_EACH_KIND = 4  # layouts that are simulated, however loose the bounds of their kind
_NEAR = 1.5  # times the fastest: what is slower is shown where nothing else runs here
_MOST_OFFLOADED = 2  # plans, of layouts that were to need none of it
_MOST_SIMULATED = 60  # with layers as single ops; the next one's bound then is the gap's


def search_layouts(  # noqa: PLR0913
    job: Job,
    num_gpus: int,
    cluster: Cluster,
    fixed: Mapping[str, Any] | None = None,
    keep: int = 3,
    progress: Callable[[str], None] = lambda text: None,
    caps: Caps | None = None,
    here: RunsHere | None = None,
) -> SearchResult:
    """Bound all layouts, simulate the best looking ones, best first, until none can be better.

    Args:
        job: model, batch and precision; its layout is not looked at.
        fixed: fields of the layout that are not left open.
        keep: so many families of the best, which differ in degrees, are simulated whole, beside the
            fastest of each kernel set and of each number of experts' ranks.
        caps: of one GPU; None: its share of all that a node has.
        here: layouts have to run here, and are planned whole.

    Raises:
        NoLayoutError: none is possible (every reason once) or none fits (bytes by class).
    """
    fixed = {name: value for name, value in (fixed or {}).items() if value is not None}
    require_axes(fixed, num_gpus, "GPUs" if here is None else "ranks")
    if here is not None:
        caps = caps or gpu_caps(cluster, here.machine, num_gpus)
        pricing = Pricing(cluster, here.machine, caps)
        return fastest_planned(SearchSpace(job, num_gpus, cluster, pricing, fixed, here), progress)
    if num_gpus == 1 and run_refusal(job.shape, job.recipe, _alone(fixed)) is None:
        return _search_alone(job, cluster, fixed, caps)
    cluster = cluster if job.network_reduction else without_reduction(cluster)
    machine = machine_of(cluster)
    if job.recipe.kernels is None and job.shape.executor_refusal is None:
        chosen = {"kernels": usual_kernels(machine, job.shape)}  # once, not layout by layout
        job = job.model_copy(update={"recipe": job.recipe.model_copy(update=chosen)})
    caps = caps or gpu_caps(cluster, machine, num_gpus)
    pricing = Pricing(cluster, machine, caps)
    asked = SearchSpace(job, num_gpus, cluster, pricing, fixed)
    possible = asked.possible()
    progress(f"bounds of {len(possible):,} layouts")
    bounds = BoundTables(job, pricing).of(possible)
    offload = fixed.get("offload")  # None: where nothing fits without
    found: SearchResult | None = None
    for allowed in (False, True) if offload is None else (bool(offload),):
        memory = Memory.of(caps, machine, offload=allowed)
        found = _ranked(asked, possible, bounds, memory, keep, progress)
        if found is not None:
            return found
    raise none_fits(asked, possible, bounds, memory)


def _ranked(
    asked: SearchSpace, possible: list[Layout], bounds: Bounds, memory: Memory, keep: int,
    progress: Callable[[str], None],
) -> SearchResult | None:  # fmt: skip
    """The best of what fits a memory; None where nothing does.

    The best-bounded layouts of each kernel set and of each number of experts' ranks are simulated
    whatever their bound, so that a kind is not left out because its bounds are loose.
    """
    job, pricing = asked.job, asked.pricing
    fits = np.flatnonzero(bounds.memory_bytes <= memory.most_bytes)
    if not len(fits):
        return None
    away_s = memory.away_s(bounds.memory_bytes)
    tables = BoundTables(job, pricing)
    again = Recomputed.of(tables, possible, memory)
    step_s = np.maximum(bounds.step_s + again.step_s, away_s)
    order = [int(number) for number in fits[np.argsort(step_s[fits], kind="stable")]]
    simulated: list[tuple[float, int]] = []
    leaders = _leaders(job, possible, order)
    others = [number for number in order[:_MOST_SIMULATED] if number not in leaders]
    most = len(leaders) + len(others)
    tried = keep + _MOST_MISFITS  # no more than these are simulated whole

    def simulate(some: Sequence[int], num_left: int) -> list[tuple[float, int]]:
        ranked = sorted(simulated)
        most_s = ranked[tried - 1][0] if len(ranked) >= tried else math.inf
        more_s = {n: float(away_s[n] + again.step_s[n]) for n in some}
        wanted = []
        for n in some:
            layout = again.without(possible[n])
            one = with_kernels(job.laid_out(layout), pricing.machine)
            wanted.append((one, most_s - more_s[n]))
        found = timers.folded_s(wanted, num_left)
        return [(found_s + more_s[n], n) for n, found_s in zip(some, found, strict=True)]

    def tell() -> None:
        best = ""
        if simulated:
            best_s, best_number = min(simulated)
            best = f", best so far {possible[best_number].text}: about {best_s:.4g} s"
        progress(f"{len(simulated)} of at most {most} layouts simulated{best}")

    with LayoutTimers(pricing) as timers:
        while leaders:
            tell()
            some, leaders = leaders[: timers.width], leaders[timers.width :]
            simulated += simulate(some, len(leaders) + len(others))
        while others and not _is_beaten(float(step_s[others[0]]), simulated, keep):
            tell()
            some, others = others[: timers.width], others[timers.width :]
            for one in simulate(some, len(others)):
                if _is_beaten(float(step_s[one[1]]), simulated, keep):
                    break
                simulated.append(one)
        layouts = [
            (possible[n].model_copy(update={"offload": memory.offload}), float(step_s[n]), found_s)
            for found_s, n in sorted(simulated)
        ]
        best = _Whole(job, layouts, timers, keep, progress).best()
    if not best:
        return None
    return SearchResult(best, float(step_s[order[0]]), len(possible), len(fits), len(simulated))


_Kind = tuple[bool, int]
_Family = tuple[bool, int, int, int, int, int]


def _kind(job: Job, layout: Layout) -> _Kind:
    """Whether twinstream's own kernels compute a layout, and over how many ranks experts are."""
    return cluster_refusal(job.shape, job.recipe, layout) is None, layout.ep


def _family(job: Job, layout: Layout) -> _Family:
    """What layouts of one row of a table have in common: kernel set and degrees."""
    is_own, ep = _kind(job, layout)
    return is_own, layout.tp, layout.cp, layout.pp, layout.dp, ep


def _leaders(job: Job, possible: Sequence[Layout], order: Sequence[int]) -> list[int]:
    """The first few of each kind, best bound first."""
    found: dict[_Kind, list[int]] = {}
    for number in order:
        leaders = found.setdefault(_kind(job, possible[number]), [])
        if len(leaders) < _OF_EACH_KIND:
            leaders.append(number)
    return [number for leaders in found.values() for number in leaders]


def _is_beaten(bound_s: float, simulated: list[tuple[float, int]], keep: int) -> bool:
    """Whether a layout of this bound, and so all behind it, cannot be the best."""
    return len(simulated) >= keep and bound_s >= min(simulated)[0]


def _alone(fixed: Mapping[str, Any]) -> Layout:
    """The layout of one GPU, with what is fixed of it."""
    names = ("micro_batch", "recompute", "offload")
    found: dict[str, Any] = {"zero": 0, "recompute": "auto", "offload": True}
    return Layout(**found | {name: fixed[name] for name in names if name in fixed})


def _search_alone(
    job: Job, cluster: Cluster, fixed: Mapping[str, Any], caps: Caps | None
) -> SearchResult:
    """One GPU is a mesh of one: its plan is that of the machine, which cuts the step itself."""
    machine = machine_of(cluster)
    job = with_kernels(job.model_copy(update={"layout": _alone(fixed)}), machine)
    require_possible(job, 1)
    is_fixed = "micro_batch" in fixed
    chunk_tokens = job.layout.micro_batch * job.seq_len if is_fixed else None
    schedule = schedule_alone(job, machine, chunk_tokens, caps)
    micro_batch = max(1, schedule.workload.chunk_tokens // job.seq_len)
    layout = job.layout.model_copy(update={"micro_batch": micro_batch})
    job = job.laid_out(layout)
    bound_s = schedule.bound.step_s if schedule.bound is not None else 0.0
    timeline = simulate(schedule, machine)
    prediction = predicted_whole(job, schedule, timeline, machine, schedule.caps)
    found = RankedLayout(job, bound_s, prediction, schedule, timeline)
    return SearchResult((found,), bound_s, 1, 1, 1)


class _Whole:
    """The best of what was simulated folded, whole; what then does not fit is left out.

    Args:
        ranked: layouts with their bounds and their seconds simulated folded, fastest first.
    """

    def __init__(
        self, job: Job, ranked: list[tuple[Layout, float, float]], timers: LayoutTimers, keep: int,
        progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._job, self._ranked, self._timers = job, ranked, timers
        self._keep, self._progress = keep, progress
        self._found: dict[int, RankedLayout] = {}  # by the place in what was ranked
        self._misfits: set[int] = set()

    def best(self) -> tuple[RankedLayout, ...]:
        """One of each family: the `keep` fastest, the fastest that runs here, and the fastest over
        each number of experts' ranks that is not far slower."""
        while left := [place for place in self._wanted() if place not in self._found]:
            self._simulate(left)
        ranked = sorted(self._found.values(), key=lambda one: one.prediction.step_s)
        shown: list[RankedLayout] = []
        families: set[_Family] = set()
        kinds: set[_Kind] = set()
        for one in ranked:
            kind, family = _kind(self._job, one.layout), _family(self._job, one.layout)
            is_near = one.prediction.step_s < _NEAR * ranked[0].prediction.step_s
            is_first = kind not in kinds and (kind[0] or is_near)
            if family not in families and (len(families) < self._keep or is_first):
                shown.append(one)
            families.add(family)
            kinds.add(kind)
        return tuple(shown)

    def _wanted(self) -> list[int]:
        """The first few, of each family the first until there are enough, the first of each kind.

        Plans take minutes where they use the host's memory: then no more than two are made.
        """
        wanted: list[int] = []
        families: set[_Family] = set()
        kinds: set[_Kind] = set()
        is_slow = any(one.prediction.is_offloaded for one in self._found.values())
        plans = [one for one in self._found.values() if self._is_planned(one.layout)]
        most = 1 if self._ranked[0][0].offload else _MOST_OFFLOADED
        is_enough = is_slow and len(plans) >= most
        for place, (layout, _, step_s) in enumerate(self._ranked):
            if place in self._misfits:
                continue
            kind, family = _kind(self._job, layout), _family(self._job, layout)
            is_new = family not in families and len(families) < self._keep
            is_near = step_s < _NEAR * self._ranked[0][2]
            is_first = kind not in kinds and (kind[0] or is_near)
            if not (len(wanted) < self._keep or is_new or is_first):
                continue
            is_over = len(self._misfits) >= _MOST_MISFITS
            if place not in self._found and (is_over or (is_enough and self._is_planned(layout))):
                continue
            wanted.append(place)
            families.add(family)
            kinds.add(kind)
        return wanted

    def _is_planned(self, layout: Layout) -> bool:
        """Whether the planner makes it, which takes longest."""
        return layout.offload or _kind(self._job, layout)[0]

    def _simulate(self, left: Sequence[int]) -> None:
        """Some of them: those that take no plan first."""
        quick = [place for place in left if not self._is_planned(self._ranked[place][0])]
        is_alone = not quick and self._ranked[left[0]][0].offload  # such a plan takes a minute
        places = (quick or left)[: 1 if is_alone else self._timers.width]
        self._tell(places[0])
        jobs = [self._job.model_copy(update={"layout": self._ranked[place][0]}) for place in places]
        timed = self._timers.predictions(jobs, len(left) - len(places))
        for place, one in zip(places, timed, strict=True):
            if one is not None and one[1].fits:
                self._found[place] = RankedLayout(one[0], self._ranked[place][1], one[1])
            else:
                self._misfits.add(place)

    def _tell(self, place: int) -> None:
        best = ""
        if self._found:
            fastest = min(self._found.values(), key=lambda one: one.prediction.step_s)
            best = f", best so far {fastest.layout.text}: {fastest.prediction.step_s:.4g} s"
        self._progress(f"simulating whole {self._ranked[place][0].text}{best}")
