"""A layout simulated with its layers as single ops, each as long as its chain takes alone."""

from collections.abc import Mapping

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.lower import lower
from twinstream.clusters.search.chains import Pricing, layer_times
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule, Exchange
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.cluster.costs import ClusterCosts, Demand, ExchangeDemand
from twinstream.simulator.cluster.simulate import replay_cluster


def folded_step_s(job: Job, pricing: Pricing) -> float:
    """Seconds of a step: pipeline, gradients and updates simulated, layers not looked into.

    To the last update of one step from idle streams. What gradients that are being reduced take
    from layers' own talk is not seen, nor what messages take of the compute.
    """
    cluster, machine = pricing.cluster, pricing.machine
    times = layer_times(job, pricing)
    layers = {"forward": times.forward, "backward": times.backward, "weight": times.weight}
    counts = _counts(job)
    steps = []
    for count in counts:
        layout = job.layout
        few = job.model_copy(update={"global_batch": count * layout.dp * layout.micro_batch})
        ref = MachineRef(name=cluster.name, content_hash=cluster.name)
        document = lower(few, cluster.count("gpus_per_node"), ref, folded=True)
        costs = _FoldedCosts(document, cluster, machine, layers)
        steps.append(replay_cluster(document, costs, cluster.name, num_passes=1).step_ns)
    step_ns = steps[-1]
    if len(counts) > 1:
        step_ns += (
            (steps[1] - steps[0]) * (job.num_microbatches - counts[1]) / (counts[1] - counts[0])
        )
    return step_ns / 1e9


def _counts(job: Job) -> tuple[int, ...]:
    counts = (2 * job.layout.pp, 3 * job.layout.pp) if job.layout.pp > 1 else (2, 3)
    return counts if job.num_microbatches > counts[1] else (job.num_microbatches,)


class _FoldedCosts(ClusterCosts):
    """Layers' ops take what their chains take, times how many they are of."""

    def __init__(
        self,
        document: ClusterSchedule,
        cluster: Cluster,
        machine: Machine,
        layers: Mapping[str, float],
    ) -> None:
        super().__init__(document, cluster, machine)
        self._layers = layers
        self._folded: dict[str, Demand] = {}
        self._light: dict[ExchangeDemand, ExchangeDemand] = {}

    def exchange(self, exchange: Exchange) -> ExchangeDemand:
        found = super().exchange(exchange)
        if found not in self._light:
            sides = tuple(
                tuple((name, amount) for name, amount in side if name != "compute")
                for side in found.sides
            )
            light = ExchangeDemand(found.fixed_ns, found.alone_ns, sides)
            self._light[found] = found if len(found.sides) == 1 else light
        return self._light[found]

    def demand(self, number: int, op: Compute | Copy | Feed | Fetch) -> Demand:
        if not isinstance(op, Compute):
            return super().demand(number, op)
        kind, _, count = op.call.partition(".")
        if kind not in self._layers or not count.isdigit():
            return super().demand(number, op)
        if op.call not in self._folded:
            alone_ns = self._layers[kind] * int(count)
            self._folded[op.call] = Demand(
                0, alone_ns, (("compute", alone_ns),) if alone_ns else ()
            )
        return self._folded[op.call]
