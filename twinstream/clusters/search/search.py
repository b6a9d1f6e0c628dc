"""The fastest layout of a model and batch on so many GPUs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstream.clusters.job import Job
from twinstream.clusters.layout import Layout, LayoutError
from twinstream.clusters.offloading.errors import OffloadError
from twinstream.clusters.predict import Prediction, predict, without_reduction
from twinstream.clusters.refusals import refusals_of
from twinstream.clusters.search.bounds import BoundTables
from twinstream.clusters.search.chains import Pricing
from twinstream.clusters.search.folded import folded_step_s
from twinstream.clusters.search.space import layouts, require_axes
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.simulator.cluster.costs import share_of

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


@dataclass(frozen=True)
class Memory:
    """What a GPU has: `room_bytes` of its own, `most_bytes` with its share of the host's."""

    room_bytes: float
    most_bytes: float
    h2d_bytes_per_s: float

    @staticmethod
    def of(cluster: Cluster, machine: Machine, *, offload: bool) -> "Memory":
        """Without `offload` only its own."""
        room = machine.number("device_memory_bytes") - machine.number("device_reserve_bytes")
        if not offload:
            return Memory(room, room, np.inf)
        host = share_of(machine, cluster.count("gpus_per_node")).host_memory_bytes
        host_bytes = np.inf if host is None or host.value is None else host.value
        return Memory(room, room + host_bytes, machine.rate("pcie_h2d_bytes_per_s"))

    def away_s(self, memory_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """What there is no room for where memory is fullest is copied back in every step."""
        return np.maximum(0.0, memory_bytes - self.room_bytes) / self.h2d_bytes_per_s


class NoLayoutError(LayoutError):
    """No layout fits, or none is possible."""


def search(
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
    possible = _possible(job, num_gpus, cluster, fixed)
    progress(f"bounds of {len(possible):,} layouts")
    bounds = BoundTables(job, pricing).of(possible)
    memory = Memory.of(cluster, machine, offload=bool(fixed.get("offload")))
    fits = np.flatnonzero(bounds.memory_bytes <= memory.most_bytes)
    if not len(fits):
        raise _none_fits(possible, bounds.memory_bytes, memory.most_bytes, num_gpus)
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
        raise _none_fits(possible, bounds.memory_bytes, memory.most_bytes, num_gpus)
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


def _possible(job: Job, num_gpus: int, cluster: Cluster, fixed: Mapping[str, Any]) -> list[Layout]:
    reasons: dict[str, None] = {}
    found = []
    for layout in layouts(
        job.shape, num_gpus, cluster.count("gpus_per_node"), job.seq_len, job.global_batch, fixed
    ):
        why = refusals_of(job.model_copy(update={"layout": layout}), num_gpus)
        if why:
            reasons |= dict.fromkeys(why)
        else:
            found.append(layout)
    if not found:
        told_reasons = "; ".join(list(reasons)[:4]) or (
            f"no degrees that divide {num_gpus} GPUs, the model and a global batch of "
            f"{job.global_batch} fit together"
        )
        raise NoLayoutError(
            f"no layout of {job.shape.name} on {num_gpus} GPUs can be: {told_reasons}"
        )
    return found


def _none_fits(possible: list[Layout], memory: Any, room: float, num_gpus: int) -> NoLayoutError:
    least = int(np.argmin(memory))
    return NoLayoutError(
        f"none of {len(possible):,} layouts on {num_gpus} GPUs fits: the leanest, "
        f"{told(possible[least])}, needs {memory[least] / GIB:.1f} GiB or more of a GPU's "
        f"{room / GIB:.1f}. More GPUs, or --offload, would do"
    )


def told(layout: Layout) -> str:
    """A layout in a few words: what differs from one GPU with a microbatch of one.

    >>> told(Layout(tp=8, pp=4, dp=16, virtual_stages=5, pipeline="interleaved"))
    'tp8 pp4x5 dp16 mb1 interleaved zero1'
    """
    words = [f"tp{layout.tp}"]
    words += [f"cp{layout.cp}"] if layout.cp > 1 else []
    stages = f"x{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    words += [f"pp{layout.pp}{stages}", f"dp{layout.dp}"]
    words += [f"ep{layout.ep}"] if layout.ep > 1 else []
    words += [f"mb{layout.micro_batch}"]
    words += [layout.pipeline] if layout.pp > 1 else []
    words += [f"zero{layout.zero}"]
    words += [f"recompute-{layout.recompute}"] if layout.recompute != "none" else []
    return " ".join(words)
