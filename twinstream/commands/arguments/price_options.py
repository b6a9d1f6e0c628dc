"""The options that say how long a run on a cluster is, and what its time is charged by."""

from typing import Annotated, Self

from twinstream.cost.bill import Bill, CostError, Prices, bill_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, place_names
from twinstream.hardware_profiles.loader import load_machine
from twinstream.schedule.node import from_options, quantity

_BILLION = 1e9


class RunOptions(Prices):
    """A run on a cluster, and what it is charged by; None where not given."""

    tokens: Annotated[
        float | None,
        quantity("With --cluster: tokens of the run, for its days and money; by default a billion "
                 "where a price is given.", "N", gt=0),
    ] = None  # fmt: skip

    @property
    def is_charged(self) -> bool:
        """True where a bill is asked for."""
        return self.tokens is not None or self.price_per_gpu_hour is not None

    def require_possible(self) -> None:
        """
        Raises:
            CostError: numbers contradict each other, or are of the checkpoints or failures of no
                run.
        """
        if not self.is_charged and (given := self.given()):
            raise CostError(f"{', '.join(given)} needs --tokens, or --price-per-gpu-hour")
        assert self.goodput is None or self.goodput > 0

    def at(self, price_per_gpu_hour: float) -> Self:
        """The same for another price.

        Raises:
            ArgumentError: it is no price.
        """
        return from_options(type(self), {**dict(self), "price_per_gpu_hour": price_per_gpu_hour})

    def on(self, machine: str | None, cluster: str | None) -> Self:
        """Return the charges where a run is planned, if prices are by name.

        Raises:
            CostError: none is of this machine or cluster.
        """
        names = () if cluster is None else place_names(load_cluster(cluster))
        if machine is not None:
            names += place_names(load_machine(machine))
        return self.of_place(*names)

    @property
    def num_tokens(self) -> float:
        """The tokens that a bill is of."""
        return _BILLION if self.tokens is None else self.tokens

    def given(self) -> list[str]:
        """The flags that are set."""
        return [f"--{name.replace('_', '-')}" for name, value in self if value is not None]

    def bill(self, tokens_per_s: float, num_gpus: int, of_gpus: int | None = None) -> Bill | None:
        """Return the bill of `num_tokens` tokens at this speed; None where none is asked for.

        Args:
            of_gpus: that --mtbf-hours is of; more GPUs fail more often. By default `num_gpus`.
        """
        if not self.is_charged:
            return None
        mtbf_hours = self.mtbf_hours and self.mtbf_hours * (of_gpus or num_gpus) / num_gpus
        prices = self.model_copy(update={"mtbf_hours": mtbf_hours})
        return bill_of(self.num_tokens / tokens_per_s, num_gpus, prices)
