"""What a run of known length is charged: days, GPU-hours, money."""

from typing import Annotated

from pydantic import Field

from twinstream.cost.goodput import Interruptions
from twinstream.schedule.node import Node

_DAY_S, _HOUR_S = 86400, 3600


class Prices(Node):
    """What time is charged by.

    Fields:
        interruptions: of a run that stands still at times; None where nothing is known of them.
        price_per_gpu_hour: in any currency; None if money is not asked for.
    """

    interruptions: Interruptions | None = None
    price_per_gpu_hour: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | None = None


class Bill(Node):
    """Time and money of a run; None is not asked for.

    Fields:
        run_days: days of training alone, 24 hours each.
        goodput: share of the wall time that trains.
        wall_days: run_days / goodput; run_days where no goodput is given.
        num_gpus: GPUs that are paid for, all of them all the time.
        gpu_hours: wall hours times GPUs.
        price_per_gpu_hour, money: the given price, and it times gpu_hours.
    """

    run_days: float
    goodput: float | None
    wall_days: float
    num_gpus: int
    gpu_hours: float
    price_per_gpu_hour: float | None
    money: float | None


def bill_of(run_s: float, num_gpus: int, prices: Prices) -> Bill:
    """The bill of a run that trains for so many seconds."""
    goodput = prices.interruptions.goodput if prices.interruptions else None
    wall_s = run_s if goodput is None else run_s / goodput
    gpu_hours = wall_s / _HOUR_S * num_gpus
    price = prices.price_per_gpu_hour
    return Bill(
        run_days=run_s / _DAY_S,
        goodput=goodput,
        wall_days=wall_s / _DAY_S,
        num_gpus=num_gpus,
        gpu_hours=gpu_hours,
        price_per_gpu_hour=price,
        money=None if price is None else price * gpu_hours,
    )
