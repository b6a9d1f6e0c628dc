"""Stages that take given times, and communication that takes none: pipelines in closed form."""

from collections.abc import Mapping

from tests.clusters.random_jobs import DENSE, job_of, lowered
from twinstream.schedule.document import Exchange, Schedule
from twinstream.schedule.ops import Compute, Op
from twinstream.simulator.costs import OpCost
from twinstream.simulator.flows import Flow
from twinstream.simulator.network_costs import ExchangeCost


class LayerTimes:
    """Costs of every rank: ns of a layer forward, backward and (zero-bubble) of its weights'
    gradients."""

    wait_ns = 0
    capacity: Mapping[str, float] = {"compute": 1.0}

    def __init__(self, forward: int, backward: int, weight: int = 0) -> None:
        self._ns = {"layer_forward": forward, "layer_backward": backward, "weight": weight}

    def rank(self, number: int) -> "LayerTimes":
        return self

    def exchange(self, exchange: Exchange) -> ExchangeCost:
        return ExchangeCost(0, 0.0)

    def cost(self, op: Op) -> OpCost:
        assert isinstance(op, Compute)
        each = self._ns.get(op.label.kind, 0)
        if not each or op.call == "pass_on":  # of a stage without layers
            return OpCost(0, None)
        taken = float(each * int(op.call.rpartition(".")[2]))  # forward.4: of four layers
        return OpCost(0, Flow(taken, (("compute", taken),)))


def pipeline(
    order: str, pp: int, num_microbatches: int, virtual: int = 1, layers: int = 1
) -> Schedule:
    """So many layers in each virtual stage."""
    shape = DENSE.model_copy(update={"num_layers": pp * virtual * layers})
    fields = {"pp": pp, "virtual_stages": virtual, "pipeline": order}
    return lowered(job_of(num_microbatches, shape, **fields))
