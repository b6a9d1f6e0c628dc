"""A layout simulated with its layers as single ops, each as long as its chain takes alone."""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import chain

from twinstream.clusters.assembling import assembled
from twinstream.clusters.search.chains import Pricing, layer_times
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import stages_of
from twinstream.models.lowering.parts.layers import kind_name
from twinstream.schedule.document import Exchange, Schedule
from twinstream.schedule.ops import Compute, Op
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.costs import CostModel, OpCost
from twinstream.simulator.flows import Flow
from twinstream.simulator.network_costs import ClusterCosts, ExchangeCost
from twinstream.simulator.replay import replay_cluster


def folded_step_s(job: Job, pricing: Pricing, most_s: float = math.inf) -> float:
    """Seconds of a step: pipeline, gradients and updates simulated, layers not looked into.

    To the last update of one step from idle streams. What gradients that are being reduced take
    from layers' own exchanges is not seen, nor what messages take of the compute.

    Args:
        most_s: of a step that surely takes longer, it is enough to know that: what a few
            microbatches take and, for each further one, its computation on the fullest stage.
    """
    cluster, machine = pricing.cluster, pricing.machine
    counts, layout = _counts(job), job.layout
    layers, whole = dict[str, float](), dict[int, float]()
    for kind in set(map(job.shape.kind_of, range(job.shape.num_layers))):
        times, name = layer_times(job.of_kind(kind), pricing), kind_name(kind)
        layers |= {
            f"{phase}{name}": getattr(times, phase) for phase in ("forward", "backward", "weight")
        }
        late = times.weight * (layout.pipeline == "zero_bubble")
        whole[kind] = times.forward + times.backward + late
    each_ns = _most_of_layers(job, whole)
    steps: list[float] = []
    for count in counts:
        if steps:
            least_s = (steps[0] + each_ns * (job.num_microbatches - counts[0])) / 1e9
            if least_s > most_s:
                return least_s
        few = job.model_copy(update={"global_batch": count * layout.dp * layout.micro_batch})
        ref = MachineRef(name=cluster.name, content_hash=cluster.name)
        document = assembled(few, cluster.count("gpus_per_node"), ref, folded=True)
        costs = _FoldedCosts(document, cluster, machine, layers)
        steps.append(replay_cluster(document, costs, cluster.name, num_passes=1).step_ns)
    step_ns = steps[-1]
    if len(counts) > 1:
        step_ns += (
            (steps[1] - steps[0]) * (job.num_microbatches - counts[1]) / (counts[1] - counts[0])
        )
    return step_ns / 1e9


def _most_of_layers(job: Job, each: Mapping[int, float]) -> float:
    """Of a stage, all its virtual stages together, by what a layer of a kind takes."""
    spans, pp = stages_of(job.layout, job.shape.num_layers), job.layout.pp
    kinds = [Counter(map(job.shape.kind_of, chain(*spans[stage::pp]))) for stage in range(pp)]
    return max(sum(count * each[kind] for kind, count in one.items()) for one in kinds)


def _counts(job: Job) -> tuple[int, ...]:
    counts = (2 * job.layout.pp, 3 * job.layout.pp) if job.layout.pp > 1 else (2, 3)
    return counts if job.num_microbatches > counts[1] else (job.num_microbatches,)


class _FoldedRank:
    """A rank's costs: layers' ops take what their chains take, times how many they are of."""

    def __init__(self, rank: CostModel, layers: Mapping[str, float]) -> None:
        self._rank, self._layers = rank, layers
        self.wait_ns, self.capacity = rank.wait_ns, rank.capacity
        self._folded: dict[str, OpCost] = {}

    def cost(self, op: Op) -> OpCost:
        if not isinstance(op, Compute):
            return self._rank.cost(op)
        kind, _, count = op.call.partition(".")
        if kind not in self._layers or not count.isdigit():
            return self._rank.cost(op)
        if op.call not in self._folded:
            alone_ns = self._layers[kind] * int(count)
            flow = Flow(alone_ns, (("compute", alone_ns),)) if alone_ns else None
            self._folded[op.call] = OpCost(0, flow)
        return self._folded[op.call]


class _FoldedCosts(ClusterCosts):
    """Exchanges of several sides draw nothing of the compute."""

    def __init__(
        self,
        document: Schedule,
        cluster: Cluster,
        machine: Machine,
        layers: Mapping[str, float],
    ) -> None:
        super().__init__(document, cluster, machine)
        numbers = range(len(document.classes))
        self._folded_ranks = [
            _FoldedRank(super(_FoldedCosts, self).rank(i), layers) for i in numbers
        ]
        self._light: dict[ExchangeCost, ExchangeCost] = {}

    def rank(self, number: int) -> CostModel:
        return self._folded_ranks[number]

    def exchange(self, exchange: Exchange) -> ExchangeCost:
        found = super().exchange(exchange)
        if found not in self._light:
            sides = tuple(
                tuple((name, amount) for name, amount in side if name != "compute")
                for side in found.sides
            )
            light = ExchangeCost(found.fixed_ns, found.alone_ns, sides)
            self._light[found] = found if len(found.sides) == 1 else light
        return self._light[found]
