"""Stages that take given times, and communication that takes none: pipelines in closed form."""

from collections.abc import Mapping

from tests.clusters.random_jobs import DENSE, job_of, lowered
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule, Exchange
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch
from twinstream.simulator.cluster.costs import Demand, ExchangeDemand


class LayerTimes:
    """Costs: ns of a layer forward, backward and (zero-bubble) of its weights' gradients."""

    def __init__(self, forward: int, backward: int, weight: int = 0) -> None:
        self._ns = {"layer_forward": forward, "layer_backward": backward, "weight": weight}

    def wait_ns(self, number: int) -> int:
        return 0

    def capacity(self, number: int) -> Mapping[str, float]:
        return {"compute": 1.0}

    def demand(self, number: int, op: Compute | Copy | Feed | Fetch) -> Demand:
        assert isinstance(op, Compute)
        each = self._ns.get(op.label.kind, 0)
        if not each or op.call == "pass_on":  # of a stage without layers
            return Demand(0, 0.0)
        taken = float(each * int(op.call.rpartition(".")[2]))  # forward.4: of four layers
        return Demand(0, taken, (("compute", taken),))

    def exchange(self, exchange: Exchange) -> ExchangeDemand:
        return ExchangeDemand(0, 0.0)


def pipeline(
    order: str, pp: int, num_microbatches: int, virtual: int = 1, layers: int = 1
) -> ClusterSchedule:
    """So many layers in each virtual stage."""
    shape = DENSE.model_copy(update={"num_layers": pp * virtual * layers})
    fields = {"pp": pp, "virtual_stages": virtual, "pipeline": order}
    return lowered(job_of(num_microbatches, shape, **fields))
