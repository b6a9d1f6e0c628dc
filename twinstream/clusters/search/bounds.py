"""What no schedule of a layout can beat, and bytes that it needs at least; of all layouts at once.

T >= max over stages r of: forward and backward of the stages before it and their messages, then m
times its own forward and backward, then what follows the last: the last gradients reduced, the
update. And no less than what any one of its queues of communication takes. With several virtual
stages the way to a stage is through one of them each. Zero-bubble's last stage has put off
weights' gradients of pp - 1 microbatches, which run beside the backward of the stages before it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from twinstream.clusters.kernel_sets import with_kernels
from twinstream.clusters.search.chains import LayerTimes, Pricing, layer_times
from twinstream.hardware_profiles.clusters.curves import Collective
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, Recompute, stages_of
from twinstream.models.layouts.own_work import OwnWork
from twinstream.models.layouts.saved import head_peak_bytes, saved_bytes, stored_hidden_bytes
from twinstream.models.loss import CrossEntropy
from twinstream.models.lowering.parts.groups import (
    Group,
    embedding_group,
    groups_of_layer,
    head_group,
    mesh_of,
)

_Key = tuple[object, ...]


class HasRoom(Protocol):
    """Memory of a GPU, and whether what has no room may be on the host."""

    @property
    def room_bytes(self) -> float: ...

    @property
    def offload(self) -> bool: ...


@dataclass(frozen=True)
class Bounds:
    """By layout: seconds that its step takes at least, and bytes of its fullest stage at least."""

    step_s: np.ndarray
    memory_bytes: np.ndarray


@dataclass(frozen=True)
class _Column:
    """What the bound of a layout is made of; times in ns, bytes of a rank.

    Of the layers of the first and the last stage, and of those of the stage that takes longest or
    has most; `way` is the way through all but the last.
    """

    first: float
    last: float
    most: float
    way: float
    put_off: float
    embedding: float
    head: float
    message: float
    tail: float
    queue: float
    microbatches: int
    pp: int
    most_bytes: float
    last_weights: float
    ends: tuple[float, float]
    logits: float


@dataclass(frozen=True)
class Recomputed:
    """By layout: seconds that a step takes longer where the planner has to recompute.

    Of layouts that leave it to the planner (`auto`), bounds are without recomputation and memory is
    with all of it. What then has no room is recomputed at the least cost a byte of the levels.
    """

    step_s: np.ndarray

    @staticmethod
    def of(tables: "BoundTables", layouts: Sequence[Layout], memory: "HasRoom") -> "Recomputed":
        """Without offload; with it nothing has to be recomputed."""
        step_s = np.zeros(len(layouts))
        places = [n for n, layout in enumerate(layouts) if layout.recompute == "auto"]
        if memory.offload or not places:
            return Recomputed(step_s)
        none = tables.of([_recomputing(layouts[n], "none") for n in places])
        full = tables.of([_recomputing(layouts[n], "full") for n in places])
        spared = np.maximum(1.0, none.memory_bytes - full.memory_bytes)
        share = np.clip((none.memory_bytes - memory.room_bytes) / spared, 0.0, 1.0)
        cost = tables.least_cost([layouts[n] for n in places])
        step_s[places] = share * cost * (full.step_s - none.step_s)
        return Recomputed(step_s)

    def without(self, layout: Layout) -> Layout:
        """The layout with all on the device and nothing recomputed that need not be."""
        found = layout.model_copy(update={"offload": False})
        return _recomputing(found, "none") if layout.recompute == "auto" else found


def has_bounds(job: Job) -> bool:
    """Whether bounds know the job's step: in whole sequences."""
    return job.cut is None and job.recipe.loss == CrossEntropy()


def _recomputing(layout: Layout, what: Recompute) -> Layout:
    return layout.model_copy(update={"recompute": what})


class BoundTables:
    """Times and bytes of layers by what they hang on, so that many layouts share them."""

    def __init__(self, job: Job, pricing: Pricing) -> None:
        self._job, self._pricing = job, pricing
        self._layers: dict[_Key, LayerTimes] = {}
        self._saved: dict[_Key, tuple[int, int]] = {}
        self._tails: dict[_Key, tuple[float, float, float]] = {}
        self._groups: dict[_Key, tuple[list[Group], Group, Group]] = {}
        self._costs: dict[int, float] = {}

    def of(self, found: Sequence[Layout]) -> Bounds:
        """The bounds of layouts of one job, which differ in the layout alone."""
        columns = [self._column(layout) for layout in found]

        def get(name: str) -> np.ndarray:
            return np.array([getattr(column, name) for column in columns], dtype=float)

        m, pp = get("microbatches"), get("pp")
        embedding, head = get("embedding"), get("head")
        messages = 2 * (pp - 1) * get("message")
        step_ns = np.maximum.reduce(
            [
                m * (get("first") + embedding),
                get("way") + messages + embedding + m * (get("last") + head) - get("put_off"),
                m * get("most"),
            ]
        ) + get("tail")
        step_ns = np.maximum(step_ns, get("queue"))
        ends = np.array([max(c.ends) for c in columns])
        memory = get("most_bytes") + ends * (pp == 1)
        memory = np.maximum(
            memory, get("last_weights") + np.array([c.ends[1] for c in columns]) + get("logits")
        )
        return Bounds(step_ns / 1e9, memory)

    def split_s(self, layout: Layout) -> float:
        """The bound of a layout whose blocks are parts by our kernels, or whose experts are shared,
        which nothing else bounds.

        Of what a rank computes of whole blocks, one of tp x cp ranks has no less than its share; in
        forward each of a block's two sums over tp is waited for. The busiest of ranks that share
        experts has no fewer rows than each would have by itself.
        """
        alone: dict[str, object] = {"tp": 1, "ep": 1, "parts": None, "cp": 1, "cp_parts": None}
        alone |= {"sequence_parallel": True, "cp_exchange": "all_gather"}
        whole = layout.model_copy(update=alone)
        column, job = self._column(whole), self._job.laid_out(layout)
        sum_ns = 0.0
        if layout.tp > 1:
            mesh = mesh_of(job, self._pricing.cluster.count("gpus_per_node"))
            hidden = stored_hidden_bytes(self._job.laid_out(whole).work)
            sum_ns = self._pricing.collective_ns(
                mesh, ("tp",), "all_reduce", hidden // layout.cp, job.dtype
            )
        spans, pp = stages_of(layout, job.shape.num_layers), layout.pp
        most = max(sum(map(len, spans[r::pp])) for r in range(pp))
        share = column.most / (layout.tp * layout.cp)
        return column.microbatches * (share + 2 * most * sum_ns) / 1e9

    def least_cost(self, layouts: Sequence[Layout]) -> np.ndarray:
        """By layout: time a byte that the cheapest level spares, as a share of that of `full`."""
        found = []
        for layout in layouts:
            key = layout.micro_batch
            if key not in self._costs:
                job = self._job.laid_out(layout)
                work = with_kernels(job, self._pricing.machine).work
                assert isinstance(work, OwnWork), "others have their recomputation fixed"
                most = work.block_saved_bytes("none")
                each = [
                    self._pricing.work(works) / (most - work.block_saved_bytes(level))
                    for level, works in work.recomputes().items()
                ]
                self._costs[key] = min(each) / each[-1]
            found.append(self._costs[key])
        return np.array(found)

    def _column(self, layout: Layout) -> _Column:
        job = with_kernels(self._job.laid_out(layout), self._pricing.machine)
        shape, pp = job.shape, layout.pp
        spans = stages_of(layout, shape.num_layers)
        ranks = [Counter(map(shape.kind_of, chain(*spans[r::pp]))) for r in range(pp)]
        way = Counter(map(shape.kind_of, chain(*spans[: pp - 1])))
        kinds = {kind: job.of_kind(kind) for kind in set().union(*ranks)}
        numbers = [one.total() for one in ranks]
        times = {kind: self._times(one, kind) for kind, one in kinds.items()}
        tails = [self._tail(one, min(numbers), max(numbers), kind) for kind, one in kinds.items()]
        tail, queue, message = map(min, zip(*tails, strict=True))
        weights = {kind: self._weights(one, kind) for kind, one in kinds.items()}
        saved = {kind: self._bytes(one, kind) for kind, one in kinds.items()}
        held = _held(layout, job.num_microbatches) / layout.virtual_stages
        late = layout.pipeline == "zero_bubble"
        taken = [sum(n * times[kind].least for kind, n in one.items()) for one in ranks]
        return _Column(
            first=taken[0],
            last=taken[-1],
            most=max(taken),
            way=sum(n * times[kind].on_the_way for kind, n in way.items()),
            put_off=sum(n * times[kind].weight for kind, n in ranks[-1].items())
            * min(pp - 1, job.num_microbatches)
            * late,
            embedding=next(iter(times.values())).embedding,
            head=next(iter(times.values())).head,
            message=message,
            tail=tail,
            queue=queue,
            microbatches=job.num_microbatches,
            pp=pp,
            most_bytes=max(
                sum(n * (weights[kind][0] + saved[kind][0] * held) for kind, n in one.items())
                for one in ranks
            ),
            last_weights=sum(n * weights[kind][0] for kind, n in ranks[-1].items()),
            ends=next(iter(weights.values()))[1],
            logits=next(iter(saved.values()))[1],
        )

    def _times(self, job: Job, kind: int = 0) -> LayerTimes:
        layout = job.layout
        key = (kind, layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute,
               layout.pipeline == "zero_bubble", job.is_own, _nodes_key(job))  # fmt: skip
        if key not in self._layers:
            self._layers[key] = layer_times(job, self._pricing)
        return self._layers[key]

    def _tail(self, job: Job, fewest: int, layers: int, kind: int) -> tuple[float, float, float]:
        """After the last backward, of the stage of fewest layers; all of the fullest queue of
        reductions or gathers; a message."""
        layout = job.layout
        key = (kind, layout.tp, layout.cp, layout.ep, layout.pp, layout.zero, layout.micro_batch,
               fewest, layers, layout.shard, layout.recompute, job.is_own)  # fmt: skip
        if key in self._tails:
            return self._tails[key]
        pricing = self._pricing
        mesh = mesh_of(job, pricing.cluster.count("gpus_per_node"))
        own = groups_of_layer(job)
        reduce_ns = gather_ns = update_ns = 0.0
        for group in own:
            summed: Collective = "all_reduce" if layout.zero == 0 else "reduce_scatter"
            reduce_ns += pricing.collective_ns(
                mesh, group.axes, summed, group.gradient_bytes, job.gradient_dtype
            )
            gather_ns += pricing.collective_ns(
                mesh, group.axes, "all_gather", group.bytes, job.dtype
            )
            count = group.trained_shard if layout.zero else group.num_trained
            update_ns += pricing.work(job.work.optimizer(count))
        count = job.num_microbatches
        queue = layers * reduce_ns * (count if layout.zero >= 2 and not job.is_own else 1)
        if layout.zero == 3:
            queue = max(queue, layers * gather_ns * (2 * count - job.is_own))
        message = 0.0
        if layout.pp > 1:
            size = stored_hidden_bytes(job.work)
            hops = range(layout.pp - 1)
            way = sum(pricing.message(mesh, size, axis="pp", sender=stage) for stage in hops)
            message = way / len(hops)
        beside = self._times(
            job, kind
        ).embedding  # its backward may be beside the last layer's reduction
        after = max(0.0, reduce_ns - beside) * (layout.dp * layout.cp > 1)
        found = (after + fewest * update_ns, queue, message)
        self._tails[key] = found
        return found

    def _weights(self, job: Job, kind: int) -> tuple[float, tuple[float, float]]:
        """Bytes of a layer's parameters, gradients and state; of embedding and of head."""
        key = (kind, job.layout.tp, job.layout.ep, job.layout.cp, job.layout.dp, job.layout.pp == 1,
               job.layout.shard)  # fmt: skip
        if key not in self._groups:
            own = list(groups_of_layer(job))
            self._groups[key] = (own, embedding_group(job), head_group(job))
        own, embedding, head = self._groups[key]
        zero = job.layout.zero
        layer = sum(_group_bytes(group, zero) for group in own)
        ends = _group_bytes(embedding, zero), _group_bytes(head, zero)
        if job.layout.pp == 1:
            ends = sum(ends), sum(ends)
        return layer, ends

    def _bytes(self, job: Job, kind: int) -> tuple[int, int]:
        """What a layer keeps of a microbatch; most that the head has."""
        layout = job.layout
        key = (kind, layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute,
               job.is_own)  # fmt: skip
        if key not in self._saved:
            work = job.work
            kept, peak = saved_bytes(work, layout.recompute), head_peak_bytes(work)
            if isinstance(work, OwnWork):  # the planner repeats what has no room
                least: Recompute = "full" if layout.recompute in ("auto", "full") else "none"
                kept = work.block_saved_bytes(least)
                peak = 0  # logits are in slices
            self._saved[key] = kept, peak
        return self._saved[key]


def _nodes_key(job: Job) -> object:
    """Whether what layers say crosses nodes hangs on the order of axes; the degrees say it."""
    layout = job.layout
    return (layout.dp, layout.pp) if layout.ep > 1 or layout.cp > 1 else None


def _group_bytes(group: Group, zero: int) -> float:
    shards = group.num_shards
    parameters: float = group.bytes
    if zero == 3 and shards > 1:
        parameters = 0 if group.has_master else group.bytes / shards
    gradients = group.gradient_bytes / (shards if zero >= 2 else 1)
    return parameters + gradients + group.state_bytes(zero >= 1 and shards > 1)


def _held(layout: Layout, count: int) -> float:
    """Microbatches of one virtual stage whose activations the first stage has at once, at least."""
    pp, chunks = layout.pp, layout.virtual_stages
    match layout.pipeline:
        case "gpipe":
            return count
        case "ring":
            return count * chunks
        case "interleaved":
            ahead = count * chunks if count == pp else (pp - 1) * 2 + (chunks - 1) * pp
            return min(count * chunks, ahead + 1)
    return min(count, pp)
