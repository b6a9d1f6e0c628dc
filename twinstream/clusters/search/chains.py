"""How long one layer takes a rank, with what it says inside; nothing else running."""

from dataclasses import dataclass
from typing import get_args

from twinstream.hardware_profiles.clusters.curves import Collective, Sums
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.rank_group import RankGroup
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.layouts.job import Job
from twinstream.models.lowering.parts.groups import mesh_of
from twinstream.models.lowering.parts.layer_parts import (
    CollectiveElement,
    LayerCompute,
    LayerParts,
    Ring,
    layer_parts,
)
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Caps, Mesh
from twinstream.simulator.network_costs import IN_PIECES, equally_near

NCCL_DTYPES = {"bfloat16": "half", "float16": "half", "float32": None}


@dataclass(frozen=True)
class LayerTimes:
    """Nanoseconds of one layer and one microbatch.

    `forward` and `backward` with all that is said; `weight` of what zero-bubble puts off (then
    `backward` is without). No overlap beats `least` of forward and backward of one microbatch
    after the other, and `on_the_way` of its way through the layer and back.
    """

    forward: float
    backward: float
    weight: float
    least: float
    on_the_way: float
    embedding: float
    head: float


class Pricing:
    """Times of work and of collectives of a job's mesh, each found once, within caps of a GPU."""

    def __init__(self, cluster: Cluster, machine: Machine, caps: Caps | None = None) -> None:
        self.cluster, self.machine, self.caps = cluster, machine, caps
        self._works: dict[Work, float] = {}

    def work(self, works: tuple[Work, ...]) -> float:
        """Nanoseconds of kernels, one after the other."""
        total = 0.0
        for work in works:
            if work not in self._works:
                self._works[work] = cost_alone_ns((work,), self.machine)
            total += self._works[work]
        return total

    def collective_ns(
        self, mesh: Mesh, axes: tuple[str, ...], collective: Collective, size_bytes: int, dtype: str
    ) -> float:
        """Nanoseconds of a collective along axes of the mesh, by whichever sums are faster."""
        present = tuple(axis for axis in axes if axis in mesh.names)
        ranks = 1
        for axis in present:
            ranks *= mesh.length(axis)
        if ranks == 1:
            return 0.0
        near = equally_near(ranks, mesh.ranks_on_a_node(present))
        on_node = min(mesh.ranks_per_node, mesh.size)
        group = RankGroup(ranks=ranks, ranks_per_node=near, sharing=max(1, on_node // near))
        kind = NCCL_DTYPES.get(dtype)
        asked = self.cluster, collective, size_bytes, group, kind
        return float(min(collective_time_ns(*asked, sums).time_ns for sums in get_args(Sums)))

    def message(
        self, mesh: Mesh, size_bytes: int, *, axis: str, sender: int | None = None
    ) -> float:
        """Nanoseconds of a message to the neighbour along an axis; without a sender the slowest."""
        stride, on_node = mesh.stride(axis), min(mesh.ranks_per_node, mesh.size)
        inside = mesh.length(axis) * stride <= on_node
        if sender is not None:
            inside = sender * stride // on_node == (sender + 1) * stride // on_node
        sharing = min(on_node, stride)
        group = (
            RankGroup(ranks=2, ranks_per_node=2)
            if inside
            else RankGroup(ranks=2, ranks_per_node=1, sharing=sharing)
        )
        return float(collective_time_ns(self.cluster, "send_recv", size_bytes, group).time_ns)


def layer_times(job: Job, pricing: Pricing) -> LayerTimes:
    """Of every layer of a job: elements one after the other, two queues in backward."""
    mesh = mesh_of(job, pricing.cluster.count("gpus_per_node"))
    parts = layer_parts(job)
    elements = [element for part in parts.parts for element in part.elements]
    clock = _Clock(job, pricing, mesh)
    forward = sum(clock.forward(element) for element in elements)
    late = job.layout.pipeline == "zero_bubble"
    again = forward if parts.full_recompute else 0.0
    if parts.plain:
        again = pricing.work(parts.recomputed)
    backward, weight = clock.backward(parts, late=late)
    chained = forward + again + sum(clock.chained(element) for element in elements)
    if again and isinstance(elements[-1], CollectiveElement):
        # backward does not wait for the repeated output, nor what is repeated for the first one
        chained -= 2 * clock.forward(elements[-1])
    once = sum(
        clock.forward(element) for element in elements if not isinstance(element, CollectiveElement)
    )
    repeated = again if parts.plain else once * bool(again)
    computed = once + repeated + clock.inputs(elements) + weight
    exchange = clock.outside * (2 if job.work.sequence_parallel else 1)
    return LayerTimes(
        forward=forward,
        backward=again + backward,
        weight=weight,
        least=max(chained, computed),
        on_the_way=computed if parts.plain and not late else chained - again,
        embedding=pricing.work(job.work.embedding().forward + job.work.embedding().backward)
        + exchange,
        head=pricing.work(job.work.head().forward + job.work.head().backward) + exchange,
    )


class _Clock:
    def __init__(self, job: Job, pricing: Pricing, mesh: Mesh) -> None:
        self.job, self.pricing, self.mesh = job, pricing, mesh
        self._dtype = job.dtype
        hidden = job.work.tokens * job.shape.d_model * job.work.itemsize
        split = job.work.sequence_parallel
        kind: Collective = "all_gather" if split else "all_reduce"
        self.outside = pricing.collective_ns(mesh, ("tp",), kind, hidden, self._dtype)

    def forward(self, element: LayerCompute | Ring | CollectiveElement) -> float:
        if isinstance(element, CollectiveElement):
            return self._said(element, element.forward)
        if isinstance(element, Ring):
            return self._ring(element, backward=False)
        return self.pricing.work(element.work.forward)

    def computed(self, element: LayerCompute | Ring | CollectiveElement) -> float:
        """Of backward what the weights' gradients take."""
        return (
            0.0
            if not isinstance(element, LayerCompute)
            else self.pricing.work(element.work.backward_weight)
        )

    def inputs(self, elements: list[LayerCompute | Ring | CollectiveElement]) -> float:
        """Of backward what the inputs' gradients take."""
        return sum(
            self.pricing.work(e.work.backward_input)
            if isinstance(e, LayerCompute)
            else self._ring(e, backward=True)
            for e in elements
            if not isinstance(e, CollectiveElement)
        )

    def chained(self, element: LayerCompute | Ring | CollectiveElement) -> float:
        """Of backward what follows one another: inputs' gradients and what is said of them."""
        if isinstance(element, CollectiveElement):
            return self._said(element, element.backward)
        return self.inputs([element])

    def backward(self, parts: LayerParts, *, late: bool) -> tuple[float, float]:
        """All of it, and what zero-bubble puts off; weights' gradients run beside what is said."""
        chain = compute = exchange = weight = 0.0
        for part in parts.parts[::-1]:
            again = 0.0
            if part.gathered_bytes:
                again = self.pricing.collective_ns(
                    self.mesh, ("tp",), "all_gather", part.gathered_bytes, self._dtype
                )
            for element in part.elements[::-1]:
                if isinstance(element, CollectiveElement):
                    if element.backward is not None:
                        chain = exchange = max(chain, exchange) + self._said(
                            element, element.backward
                        )
                    continue
                chain = compute = max(chain, compute) + self.inputs([element])
                own = self.computed(element)
                weight += own
                if not late and own:
                    exchange = max(exchange, chain - own) + again
                    compute = max(compute, exchange if again else 0.0) + own
        return max(chain, compute), weight

    def _said(self, element: CollectiveElement, collective: Collective | None) -> float:
        if collective is None:
            return 0.0
        size = max(element.in_bytes, element.out_bytes)
        whole = self.pricing.collective_ns(self.mesh, element.axes, collective, size, self._dtype)
        if self.job.layout.tp_overlap and element.axes == ("tp",) and collective in IN_PIECES:
            return whole * self.pricing.cluster.number("tp_exposed")
        return whole

    def _ring(self, ring: Ring, *, backward: bool) -> float:
        works = ring.step.backward_input if backward else ring.step.forward
        step = self.pricing.work(works)
        size = ring.sent_bytes(backward=backward)
        message = self.pricing.message(self.mesh, size, axis="cp")
        return step + (ring.num_steps - 1) * max(step, message)
