"""What no schedule of a layout can beat, and bytes that it needs at least; of all layouts at once.

T >= max over stages r of: forward and backward of the stages before it and their messages, then m
times its own forward and backward, then what follows the last: the last gradients reduced, the
update. And no less than what any one of its queues of communication takes. With several virtual
stages the way to a stage is through one of them each. Zero-bubble's last stage has put off
weights' gradients of pp - 1 microbatches, which run beside the backward of the stages before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinstream.clusters.job import Job
from twinstream.clusters.layout import Layout
from twinstream.clusters.lowering.groups import (
    Group,
    embedding_group,
    groups_of_layer,
    head_group,
    mesh_of,
)
from twinstream.clusters.search.chains import LayerTimes, Pricing, layer_times
from twinstream.clusters.stages import stages_of
from twinstream.hardware_profiles.clusters.curves import Collective
from twinstream.models.shapes.saved import head_peak_bytes, saved_bytes, stored_hidden_bytes

_Key = tuple[object, ...]


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


class BoundTables:
    """Times and bytes of layers by what they hang on, so that many layouts share them."""

    def __init__(self, job: Job, pricing: Pricing) -> None:
        self._job, self._pricing = job, pricing
        self._layers: dict[_Key, LayerTimes] = {}
        self._saved: dict[_Key, tuple[int, int, int]] = {}
        self._tails: dict[_Key, tuple[float, float, float]] = {}
        self._groups: dict[_Key, tuple[list[Group], Group, Group]] = {}

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

    def _column(self, layout: Layout) -> _Column:
        job = self._job.model_copy(update={"layout": layout})
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
               layout.pipeline == "zero_bubble", _nodes_key(job))  # fmt: skip
        if key not in self._layers:
            self._layers[key] = layer_times(job, self._pricing)
        return self._layers[key]

    def _tail(self, job: Job, fewest: int, layers: int) -> tuple[float, float, float]:
        """After the last backward, of the stage of fewest layers; all of the fullest queue of
        reductions or gathers; a message."""
        layout = job.layout
        key = (layout.tp, layout.cp, layout.ep, layout.pp, layout.zero, layout.micro_batch, fewest,
               layers, layout.gradient_dtype, layout.shard, layout.recompute)  # fmt: skip
        if key in self._tails:
            return self._tails[key]
        pricing = self._pricing
        mesh = mesh_of(job, pricing.cluster.count("gpus_per_node"))
        own = groups_of_layer(job)
        reduce_ns = gather_ns = update_ns = 0.0
        for group in own:
            kind: Collective = "all_reduce" if layout.zero == 0 else "reduce_scatter"
            reduce_ns += pricing.talk(
                mesh, group.axes, kind, group.gradient_bytes, layout.gradient_dtype
            )
            gather_ns += pricing.talk(mesh, group.axes, "all_gather", group.bytes, job.dtype)
            count = group.shard if layout.zero else group.num_parameters
            update_ns += pricing.work(job.work.optimizer(count))
        count = job.num_microbatches
        queue = layers * reduce_ns * (count if layout.zero >= 2 else 1)
        if layout.zero == 3:
            queue = max(queue, layers * gather_ns * 2 * count)
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
               job.layout.gradient_dtype, job.layout.shard)  # fmt: skip
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
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute)
        if key not in self._saved:
            work = job.work
            kept = saved_bytes(work, layout.recompute)
            self._saved[key] = kept, head_peak_bytes(work), stored_hidden_bytes(work)
        return self._saved[key]


def _nodes_key(job: Job) -> object:
    """Whether what layers say crosses nodes hangs on the order of axes; the degrees say it."""
    layout = job.layout
    return (layout.dp, layout.pp) if layout.ep > 1 or layout.cp > 1 else None


def _group_bytes(group: Group, zero: int) -> float:
    shards = group.num_shards
    parameters = 0.0 if zero == 3 and shards > 1 else group.bytes
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
