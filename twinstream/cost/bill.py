"""What a run of known length is charged: goodput, days, GPU-hours, money."""

from collections.abc import Iterable, Mapping
from math import inf, sqrt
from typing import Annotated, Any, Self

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node, option, quantity
from twinstream.schedule.sizes import parse_number

_DAY_S, _HOUR_S = 86400, 3600
MOST_PRICE = 1e12


class CostError(TwinstreamError):
    """A run, a split or a price that cannot be."""


def prices_of(given: object) -> float | dict[str, float] | None:
    """A price of an hour, or prices by machine or cluster; None where it is neither.

    >>> prices_of("$2.50"), prices_of("h100=2.5, b200=6"), prices_of("h100=-1")
    (2.5, {'h100': 2.5, 'b200': 6.0}, None)
    """
    if isinstance(given, str) and "=" in given:
        parts = [part.rpartition("=") for part in given.split(",")]
        named: Mapping[Any, object] = {name.strip(): number for name, _, number in parts}
        is_clear = len(named) == len(parts) and all(named)
        return _by_name(named) if is_clear else None
    return _by_name(given) if isinstance(given, Mapping) and given else _price(given)


def price_at(prices: float | Mapping[str, float] | None, names: Iterable[str]) -> float | None:
    """The price of what has these names, as a machine and its cluster; None where it has none.

    >>> price_at({"H100": 2.5, "b200": 6}, ("h100_dgx", "h100")), price_at({"b200": 6}, ("cpu",))
    (2.5, None)
    """
    if not isinstance(prices, Mapping):
        return prices
    by_name = {name.lower(): price for name, price in prices.items()}
    return next((by_name[name.lower()] for name in names if name.lower() in by_name), None)


def _by_name(named: Mapping[Any, object]) -> dict[str, float] | None:
    found = {str(name): _price(price) for name, price in named.items()}
    return None if None in found.values() else {n: p for n, p in found.items() if p is not None}


def _price(given: object) -> float | None:
    number = parse_number(given) if isinstance(given, str) else given
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return float(number) if 0 <= number <= MOST_PRICE else None


def _read_prices(given: object) -> object:
    if given is not None and (given := prices_of(given)) is None:
        raise PydanticCustomError(
            "price", "needs to be a price from 0 to 1e12, or one of each machine or cluster as "
            "h100=2.5,b200=6"
        )  # fmt: skip
    return given


GpuHourPrice = Annotated[
    float | dict[str, float] | None,
    BeforeValidator(_read_prices),
    option("Price of an hour of one GPU, in any currency; or of each machine or cluster, as "
           "h100=2.5,b200=6.", unit="[NAME=]PRICE,..."),
]  # fmt: skip


class Prices(Node, title="Money and goodput"):
    """What time is charged by, and what keeps a run from training; None where not given."""

    price_per_gpu_hour: GpuHourPrice = None
    checkpoint_s: Annotated[
        float | None, quantity("How long the run stands still for a checkpoint.", "SECONDS")
    ] = None
    checkpoint_interval_s: Annotated[
        float | None,
        quantity("From checkpoint to checkpoint; by default the best for --mtbf-hours.",
                 "SECONDS", gt=0),
    ] = None  # fmt: skip
    mtbf_hours: Annotated[
        float | None,
        quantity("Mean time between failures of the whole run; by default it never fails.",
                 "HOURS", gt=0),
    ] = None  # fmt: skip
    restart_s: Annotated[
        float | None, quantity("From a failure until the run trains again.", "SECONDS")
    ] = None

    def of_place(self, *names: str | None) -> Self:
        """The same with the one price of what has these names, as a machine and its cluster.

        Raises:
            CostError: prices are by name, and none is of these.
        """
        if not isinstance(self.price_per_gpu_hour, dict):
            return self
        own = [name for name in names if name]
        found = price_at(self.price_per_gpu_hour, own)
        if found is None:
            here = f"this is of {own[0]}" if own else "this is of no machine"
            told = f"{own[0]}=2.5" if own else "2.5"
            raise CostError(
                f"--price-per-gpu-hour is of {', '.join(self.price_per_gpu_hour)}, and {here}: "
                f"write {told}"
            )
        return self.model_copy(update={"price_per_gpu_hour": found})

    @property
    def goodput(self) -> float | None:
        """1 - d/t - (t/2 + R)/M: a failure costs half an interval of work and the restart.

        Checkpoint time d, interval t (by default the best, sqrt(2 d M)), restart R, mean time
        between failures M. To first order: no second failure before the next checkpoint. None
        where nothing is given.

        Raises:
            CostError: a number that goodput needs is missing, or there is no time to train.

        Source: Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006.

        >>> Prices(checkpoint_s=30, checkpoint_interval_s=900, restart_s=360, mtbf_hours=3).goodput
        0.8916666666666667
        """
        stop_s, interval_s = self.checkpoint_s, self.checkpoint_interval_s
        if stop_s is interval_s is self.mtbf_hours is self.restart_s is None:
            return None
        if stop_s is None:
            raise CostError("goodput needs --checkpoint-s, how long a checkpoint stops the run")
        if (self.mtbf_hours is None) != (self.restart_s is None):
            raise CostError(
                "failures need both --mtbf-hours and --restart-s (0 where a restart is free)"
            )
        mtbf_s, restart_s = _HOUR_S * (self.mtbf_hours or inf), self.restart_s or 0.0
        interval_s = interval_s or sqrt(2 * stop_s * mtbf_s)
        if interval_s in (0, inf):
            raise CostError(
                f"checkpoints of {stop_s:g} s have no best interval: give "
                "--checkpoint-interval-s, or --mtbf-hours to choose by"
            )
        share = 1 - stop_s / interval_s - (interval_s / 2 + restart_s) / mtbf_s
        if share <= 0:
            failures = f"a failure every {mtbf_s:g} s" if self.mtbf_hours else "no failures"
            raise CostError(
                f"checkpoints of {stop_s:g} s every {interval_s:g} s and restarts of "
                f"{restart_s:g} s with {failures} leave no time to train: goodput would be at or "
                "below zero"
            )
        return share


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


def bill_of(run_s: float, num_gpus: int, prices: Prices, places: Iterable[str] = ()) -> Bill:
    """The bill of a run that trains for so many seconds.

    Args:
        places: names of the machine or cluster, by which prices may be given.
    """
    goodput, price = prices.goodput, prices.of_place(*places).price_per_gpu_hour
    assert not isinstance(price, dict)
    wall_s = run_s if goodput is None else run_s / goodput
    gpu_hours = wall_s / _HOUR_S * num_gpus
    return Bill(
        run_days=run_s / _DAY_S,
        goodput=goodput,
        wall_days=wall_s / _DAY_S,
        num_gpus=num_gpus,
        gpu_hours=gpu_hours,
        price_per_gpu_hour=price,
        money=None if price is None else price * gpu_hours,
    )
