"""The options that say what a run's time is charged by."""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Annotated, Any

import typer

from twinstream.cost.bill import Bill, Prices, bill_of
from twinstream.cost.goodput import Interruptions, best_interval_s
from twinstream.cost.refusal import CostError, made

_MONEY, _INTERRUPTIONS = "Money", "Goodput"
_BILLION = 1e9


def _option(panel: str, metavar: str, what: str) -> Any:
    return typer.Option(metavar=metavar, help=what, rich_help_panel=panel)


@dataclass(frozen=True)
class PriceOptions:
    """Price of a GPU-hour, and what keeps a run from training; None where not given."""

    price_per_gpu_hour: Annotated[
        float | None, _option(_MONEY, "PRICE", "Price of an hour of one GPU, in any currency.")
    ] = None
    checkpoint_s: Annotated[
        float | None,
        _option(_INTERRUPTIONS, "SECONDS", "How long the run stands still for a checkpoint."),
    ] = None
    checkpoint_interval_s: Annotated[
        float | None,
        _option(
            _INTERRUPTIONS,
            "SECONDS",
            "From checkpoint to checkpoint; by default the best for --mtbf-hours.",
        ),
    ] = None
    mtbf_hours: Annotated[
        float | None,
        _option(
            _INTERRUPTIONS,
            "HOURS",
            "Mean time between failures of the whole run; by default it never fails.",
        ),
    ] = None
    restart_s: Annotated[
        float | None,
        _option(_INTERRUPTIONS, "SECONDS", "From a failure until the run trains again."),
    ] = None

    def prices(self) -> Prices:
        """
        Raises:
            CostError: a number that goodput needs is missing, or one is wrong.
        """
        given = {
            "interruptions": self._interruptions(),
            "price_per_gpu_hour": self.price_per_gpu_hour,
        }
        return made(Prices, given, {})

    def _interruptions(self) -> Interruptions | None:
        mtbf_s = None if self.mtbf_hours is None else 3600 * self.mtbf_hours
        given = (self.checkpoint_s, self.checkpoint_interval_s, mtbf_s, self.restart_s)
        if all(one is None for one in given):
            return None
        if self.checkpoint_s is None:
            raise CostError("goodput needs --checkpoint-s, how long a checkpoint stops the run")
        if (mtbf_s is None) != (self.restart_s is None):
            raise CostError(
                "failures need both --mtbf-hours and --restart-s (0 where a restart is free)"
            )
        interval_s = self.checkpoint_interval_s
        if interval_s is None and mtbf_s is None:
            raise CostError("checkpoints need --checkpoint-interval-s, or --mtbf-hours to choose")
        if interval_s is None and mtbf_s is not None:
            interval_s = best_interval_s(self.checkpoint_s, mtbf_s)
        return made(
            Interruptions,
            {
                "checkpoint_s": self.checkpoint_s,
                "interval_s": interval_s,
                "restart_s": self.restart_s or 0.0,
                "mtbf_s": mtbf_s,
            },
            {
                "interval_s": "--checkpoint-interval-s",
                "mtbf_s": "--mtbf-hours, in seconds,",
            },
        )


@dataclass(frozen=True)
class RunOptions(PriceOptions):
    """A run on a cluster, and what it is charged by; None where not given."""

    tokens: Annotated[
        float | None,
        _option(
            _MONEY,
            "N",
            "With --cluster: tokens of the run, for its days and money; by default a billion where "
            "a price is given.",
        ),
    ] = None

    @property
    def is_charged(self) -> bool:
        """Whether a bill is asked for."""
        return self.tokens is not None or self.price_per_gpu_hour is not None

    def require_possible(self) -> None:
        """
        Raises:
            CostError: a number cannot be, or is of the checkpoints or failures of no run.
        """
        if self.tokens is not None and not (isfinite(self.tokens) and self.tokens > 0):
            raise CostError(f"--tokens needs a number of tokens above 0, got {self.tokens:g}")
        if not self.is_charged and (given := self.given()):
            raise CostError(f"{', '.join(given)} needs --tokens, or --price-per-gpu-hour")
        self.prices()

    @property
    def num_tokens(self) -> float:
        """What a bill is of."""
        return _BILLION if self.tokens is None else self.tokens

    def given(self) -> list[str]:
        """The flags that are set."""
        names = [name for name, value in vars(self).items() if value is not None]
        return [f"--{name.replace('_', '-')}" for name in names]

    def bill(self, tokens_per_s: float, num_gpus: int, of_gpus: int | None = None) -> Bill | None:
        """Of `num_tokens` tokens at this speed; None where none is asked for.

        Args:
            of_gpus: that --mtbf-hours is of; more GPUs fail more often. By default `num_gpus`.
        """
        if not self.is_charged:
            return None
        mtbf_hours = self.mtbf_hours and self.mtbf_hours * (of_gpus or num_gpus) / num_gpus
        prices = replace(self, mtbf_hours=mtbf_hours).prices()
        return bill_of(self.num_tokens / tokens_per_s, num_gpus, prices)
