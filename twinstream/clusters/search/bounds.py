"""What no schedule of a layout can beat, and bytes that it needs at least; of all layouts at once.

T >= max over stages r of: forward and backward of the stages before it and their messages, then m
times its own forward and backward, then what follows the last: the last gradients reduced, the
update. And no less than what any one of its queues of communication takes. With several virtual
stages the way to a stage is through one of them each. Zero-bubble's last stage has put off
weights' gradients of pp - 1 microbatches, which run beside the backward of the stages before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """What the bound of a layout is made of; times in ns, bytes of a rank."""

    each: float
    on_the_way: float
    put_off: float
    embedding: float
    head: float
    message: float
    tail: float
    queue: float
    way_layers: int
    first_layers: int
    most_layers: int
    last_layers: int
    microbatches: int
    chunks: int
    pp: int
    weights: float
    ends: tuple[float, float]
    saved: float
    held: float
    logits: float
    hidden: float


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
    """Whether bounds know the job's step: of layers that are alike, in whole sequences."""
    experts = job.shape.experts
    are_alike = experts is None or not experts.dense_layers
    return job.cut is None and are_alike and job.recipe.loss == CrossEntropy()


def _recomputing(layout: Layout, what: Recompute) -> Layout:
    return layout.model_copy(update={"recompute": what})


class BoundTables:
    """Times and bytes of layers by what they hang on, so that many layouts share them."""

    def __init__(self, job: Job, pricing: Pricing) -> None:
        self._job, self._pricing = job, pricing
        self._layers: dict[_Key, LayerTimes] = {}
        self._saved: dict[_Key, tuple[int, int, int]] = {}
        self._tails: dict[_Key, tuple[float, float, float]] = {}
        self._groups: dict[_Key, tuple[list[Group], Group, Group]] = {}
        self._costs: dict[int, float] = {}

    def of(self, found: Sequence[Layout]) -> Bounds:
        """The bounds of layouts of one job, which differ in the layout alone."""
        columns = [self._column(layout) for layout in found]

        def get(name: str) -> np.ndarray:
            return np.array([getattr(column, name) for column in columns], dtype=float)

        m, pp, chunks = get("microbatches"), get("pp"), get("chunks")
        each, on_the_way = get("each"), get("on_the_way")
        most, last = get("most_layers"), get("last_layers")
        embedding, head = get("embedding"), get("head")
        messages = 2 * (pp - 1) * get("message")
        step_ns = np.maximum.reduce(
            [
                m * (each * get("first_layers") + embedding),
                get("way_layers") * on_the_way
                + messages
                + embedding
                + m * (each * last + head)
                - get("put_off") * last,
                m * each * most,
            ]
        ) + get("tail")
        step_ns = np.maximum(step_ns, get("queue"))
        ends = np.array([max(c.ends) for c in columns])
        memory = (
            get("weights") * most + ends * (pp == 1) + get("saved") * get("held") * most / chunks
        )
        memory = np.maximum(
            memory, get("weights") * last + np.array([c.ends[1] for c in columns]) + get("logits")
        )
        return Bounds(step_ns / 1e9, memory)

    def in_parts_s(self, layout: Layout) -> float:
        """The bound of a layout whose blocks are parts by our kernels, which nothing else bounds.

        Of what a rank computes of whole blocks, one of tp x cp ranks has no less than its share; in
        forward each of a block's two sums over tp is waited for.
        """
        alone = {"tp": 1, "parts": None, "cp": 1, "cp_parts": None, "sequence_parallel": True}
        whole = layout.model_copy(update=alone)
        column, job = self._column(whole), self._job.laid_out(layout)
        mesh = mesh_of(job, self._pricing.cluster.count("gpus_per_node"))
        hidden, sum_ns = stored_hidden_bytes(self._job.laid_out(whole).work), 0.0
        if layout.tp > 1:
            sum_ns = self._pricing.collective_ns(
                mesh, ("tp",), "all_reduce", hidden // layout.cp, job.dtype
            )
        block_ns = column.each / (layout.tp * layout.cp) + 2 * sum_ns
        return column.microbatches * column.most_layers * block_ns / 1e9

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
        spans = stages_of(layout, job.shape.num_layers)
        per_rank = [sum(len(span) for span in spans[r :: layout.pp]) for r in range(layout.pp)]
        times = self._times(job)
        tail, queue, message = self._tail(job, min(per_rank), max(per_rank))
        layer, ends = self._weights(job)
        saved, logits, hidden = self._bytes(job)
        late = layout.pipeline == "zero_bubble"
        return _Column(
            each=times.least,
            on_the_way=times.on_the_way,
            put_off=times.weight * min(layout.pp - 1, job.num_microbatches) * late,
            embedding=times.embedding,
            head=times.head,
            message=message,
            tail=tail,
            queue=queue,
            way_layers=sum(len(span) for span in spans[: layout.pp - 1]),
            first_layers=per_rank[0],
            most_layers=max(per_rank),
            last_layers=per_rank[-1],
            microbatches=job.num_microbatches,
            chunks=layout.virtual_stages,
            pp=layout.pp,
            weights=layer,
            ends=ends,
            saved=saved,
            held=_held(layout, job.num_microbatches),
            logits=logits,
            hidden=hidden,
        )

    def _times(self, job: Job) -> LayerTimes:
        layout = job.layout
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute,
               layout.pipeline == "zero_bubble", job.is_own, _nodes_key(job))  # fmt: skip
        if key not in self._layers:
            self._layers[key] = layer_times(job, self._pricing)
        return self._layers[key]

    def _tail(self, job: Job, fewest: int, layers: int) -> tuple[float, float, float]:
        """After the last backward, of the stage of fewest layers; all of the fullest queue of
        reductions or gathers; a message."""
        layout = job.layout
        key = (layout.tp, layout.cp, layout.ep, layout.pp, layout.zero, layout.micro_batch, fewest,
               layers, layout.shard, layout.recompute, job.is_own)  # fmt: skip
        if key in self._tails:
            return self._tails[key]
        pricing = self._pricing
        mesh = mesh_of(job, pricing.cluster.count("gpus_per_node"))
        own = groups_of_layer(job)
        reduce_ns = gather_ns = update_ns = 0.0
        for group in own:
            kind: Collective = "all_reduce" if layout.zero == 0 else "reduce_scatter"
            reduce_ns += pricing.collective_ns(
                mesh, group.axes, kind, group.gradient_bytes, job.gradient_dtype
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
        beside = self._times(job).embedding  # its backward may be beside the last layer's reduction
        after = max(0.0, reduce_ns - beside) * (layout.dp * layout.cp > 1)
        found = (after + fewest * update_ns, queue, message)
        self._tails[key] = found
        return found

    def _weights(self, job: Job) -> tuple[float, tuple[float, float]]:
        """Bytes of a layer's parameters, gradients and state; of embedding and of head."""
        key = (job.layout.tp, job.layout.ep, job.layout.cp, job.layout.dp, job.layout.pp == 1,
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

    def _bytes(self, job: Job) -> tuple[int, int, int]:
        layout = job.layout
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute, job.is_own)
        if key not in self._saved:
            work = job.work
            kept, peak = saved_bytes(work, layout.recompute), head_peak_bytes(work)
            if isinstance(work, OwnWork):  # the planner repeats what has no room
                least: Recompute = "full" if layout.recompute in ("auto", "full") else "none"
                kept = work.block_saved_bytes(least)
                peak = 0  # logits are in slices
            self._saved[key] = kept, peak, stored_hidden_bytes(work)
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
