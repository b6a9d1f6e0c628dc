"""The work of a whole run, and how long it takes at a given rate of each device."""

from typing import Annotated

from pydantic import Field

from twinstream.cost.bill import Bill, Prices, bill_of
from twinstream.cost.refusal import CostError
from twinstream.cost.work.batch import batch_work
from twinstream.cost.work.decoder import Batches, Decoder, Size
from twinstream.cost.work.extents import extents_of
from twinstream.cost.work.limits import Efficiency, efficiency_of
from twinstream.cost.work.mesh import Axis, Mesh
from twinstream.cost.work.steps import PassWork
from twinstream.schedule.node import Node


class Counting(Node):
    """How a run is counted and timed.

    Fields:
        recompute: backward computes and moves all that forward does once more.
        forward_only: rates and days are those of the forward alone; the counts are of both.
        bytes_per_value: of a value that travels; 2 is bfloat16.
        device_flop_per_s: rate that each device of the mesh reaches; None for no times.
        gpus_per_device: GPUs of a device of the mesh, if it is a cluster of them.
        checks: refuse a run that the rules of thumb call inefficient.
    """

    recompute: bool = False
    forward_only: bool = False
    bytes_per_value: Annotated[int, Field(gt=0, le=64)] = 2
    device_flop_per_s: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] | None = None
    gpus_per_device: Size = 1
    checks: bool = True


class Traffic(Node):
    """Bytes that all devices together send and receive, by pass."""

    sent_bytes_fwd: float
    sent_bytes_bwd: float
    received_bytes_fwd: float
    received_bytes_bwd: float


class AxisTraffic(Traffic):
    """Those along one axis of the mesh."""

    axis: Axis
    degree: int


class Rates(Node):
    """What devices do in the time that their flop rate gives.

    Fields:
        flop_per_s, sent_bytes_per_s, received_bytes_per_s: of one device, on average.
        total_...: of all of them.
        run_s: FLOPs of the run by the rate of all devices; communication is taken to overlap.
    """

    flop_per_s: float
    sent_bytes_per_s: float
    received_bytes_per_s: float
    total_flop_per_s: float
    total_sent_bytes_per_s: float
    total_received_bytes_per_s: float
    run_s: float


class WorkCost(Node):
    """All figures of a run: what `cost work` tells.

    Fields:
        decoder, batches, mesh, counting: what was asked.
        flop_fwd, flop_bwd: of the run; backward with recompute if that is on.
        traffic, axes: bytes of the run, in all and by axis.
        efficiency: rules of thumb, whether asked or not.
        rates, bill: None without a flop rate.
    """

    decoder: Decoder
    batches: Batches
    mesh: Mesh
    counting: Counting
    flop_fwd: float
    flop_bwd: float
    traffic: Traffic
    axes: tuple[AxisTraffic, ...]
    efficiency: Efficiency
    rates: Rates | None
    bill: Bill | None

    @property
    def flop_total(self) -> float:
        """Both passes."""
        return self.flop_fwd + self.flop_bwd


def cost_of_work(
    decoder: Decoder, batches: Batches, mesh: Mesh, counting: Counting, prices: Prices
) -> WorkCost:
    """Count a run.

    Raises:
        CostError: the sizes do not fit together, or a rule of thumb forbids it.
    """
    extents = extents_of(decoder, batches, mesh)
    efficiency = efficiency_of(decoder, batches, mesh)
    if counting.checks:
        efficiency.require()
    if batches.num_batches == 0:
        raise CostError(
            f"--dataset-size {batches.dataset_tokens:g} is no more than half a batch of "
            f"{batches.batch_size * batches.seq_len:,} tokens: raise it, or lower --batch-size"
        )
    if counting.device_flop_per_s is None and prices != Prices():
        raise CostError("goodput and money are of time, which needs --cluster-flop-rate")
    forward, backward = batch_work(decoder, extents)
    forward, backward = (one.times(batches.num_batches) for one in (forward, backward))
    if counting.recompute:
        backward = backward + forward
    axes = tuple(_axis_traffic(axis, mesh, forward, backward, counting) for axis in Axis)
    traffic = Traffic(
        **{field: sum(getattr(one, field) for one in axes) for field in Traffic.model_fields}
    )
    rates = _rates(forward.flop, backward.flop, traffic, mesh, counting)
    num_gpus = mesh.num_devices * counting.gpus_per_device
    return WorkCost(
        decoder=decoder,
        batches=batches,
        mesh=mesh,
        counting=counting,
        flop_fwd=forward.flop,
        flop_bwd=backward.flop,
        traffic=traffic,
        axes=axes,
        efficiency=efficiency,
        rates=rates,
        bill=None if rates is None else bill_of(rates.run_s, num_gpus, prices),
    )


def _axis_traffic(
    axis: Axis, mesh: Mesh, forward: PassWork, backward: PassWork, counting: Counting
) -> AxisTraffic:
    per_value = counting.bytes_per_value
    return AxisTraffic(
        axis=axis,
        degree=mesh.degree(axis),
        sent_bytes_fwd=per_value * forward.sent.get(axis, 0.0),
        sent_bytes_bwd=per_value * backward.sent.get(axis, 0.0),
        received_bytes_fwd=per_value * forward.received.get(axis, 0.0),
        received_bytes_bwd=per_value * backward.received.get(axis, 0.0),
    )


def _rates(
    flop_fwd: float, flop_bwd: float, traffic: Traffic, mesh: Mesh, counting: Counting
) -> Rates | None:
    each = counting.device_flop_per_s
    if each is None:
        return None
    flop, sent, received = flop_fwd, traffic.sent_bytes_fwd, traffic.received_bytes_fwd
    if not counting.forward_only:
        flop += flop_bwd
        sent += traffic.sent_bytes_bwd
        received += traffic.received_bytes_bwd
    everyone = each * mesh.num_devices
    return Rates(
        flop_per_s=each,
        sent_bytes_per_s=sent / flop * each,
        received_bytes_per_s=received / flop * each,
        total_flop_per_s=everyone,
        total_sent_bytes_per_s=sent / flop * everyone,
        total_received_bytes_per_s=received / flop * everyone,
        run_s=flop / everyone,
    )
