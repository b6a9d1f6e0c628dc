"""The best degrees of parallelism by number of devices, and the utilisation they leave.

The arithmetic is that of davidsj/ml_par_sim, run_optimizer2.ipynb: two matrices a block, limited by
FLOPs, bytes of memory or sums over the network; the pipeline's bubble; the sum of gradients.
From the most devices at full utilisation on, one degree is doubled at a time.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from math import ceil, inf, log2, sqrt
from typing import Any, NamedTuple

from twinstream.cost.bill import CostError
from twinstream.schedule.errors import ArgumentError

_DAY_S = 86400
_FULL = 0.9999  # of what one matrix product reaches
_MOST_TP, _FEW_TP = 25, 5  # degrees of the first devices that are tried
_MOST_HALVINGS = 23  # of a batch into micro-batches


@dataclass(frozen=True)
class DeviceRun:
    """A run of 20 tokens a parameter, and what it runs on; defaults are an H100's datasheet.

    Attributes:
        flops: of the run, 6 a parameter and token.
        flop_per_s: a device's peak.
        memory_bytes_per_s: of device memory.
        network_bytes_per_s: what a device exchanges, both ways together.
        utilization: share of the peaks of compute and memory that one product reaches.
        value_bytes: of what is multiplied and sent.
        hidden_factor: inner width of a block over its width.
        network_sums: whether the network adds values up, and not the devices among themselves.
        most_devices: where the curve ends.

    Raises:
        ArgumentError: one is no number, or not above 0.
    """

    flops: float
    flop_per_s: float = 989.5e12
    memory_bytes_per_s: float = 3.35e12
    network_bytes_per_s: float = 900e9
    utilization: float = 0.8
    value_bytes: float = 2
    hidden_factor: float = 5
    network_sums: bool = True
    most_devices: float = 15e6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "network_sums" and not 0 < value < inf:
                raise ArgumentError(f"{field.name} is {value}: it needs a number above 0")


class Degrees(NamedTuple):
    """Degrees of parallelism, and into how many micro-batches a batch is cut."""

    pp: int
    dp: int
    tp_residual: int
    tp_hidden: int
    microbatches: int

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.tp_residual * self.tp_hidden


class _Run:
    """N = sqrt(C / 120), 20 N tokens; 4e6 of a batch and 120 blocks at 1e25 FLOPs, x C^(1/6)."""

    def __init__(self, asked: DeviceRun) -> None:
        self.asked, grown = asked, (asked.flops / 1e25) ** (1 / 6)
        self.params = sqrt(asked.flops / 120)
        self.tokens, self.batch, self.blocks = 20 * self.params, 4e6 * grown, 120 * grown
        if self.blocks < 1:
            raise CostError(f"{asked.flops:g} FLOPs make a model of no whole block: give more")
        self.width = sqrt(self.params / (2 * asked.hidden_factor * self.blocks))
        self.value_bytes, self.peak = asked.value_bytes, asked.flop_per_s
        self.memory, self.network = asked.memory_bytes_per_s, asked.network_bytes_per_s

    def _summed(self, values: float, ranks: int) -> float:
        """Values that a rank sends and receives to sum so many."""
        if not self.asked.network_sums:
            return 3 * (ranks - 1) * values / ranks
        return 2 * values if ranks > 1 else 0.0

    def seconds(self, degrees: Degrees) -> float:
        """Of the whole run."""
        share, value_bytes = self.asked.utilization, self.value_bytes
        flop = moved = sent = gradients_s = 0.0
        wide = self.asked.hidden_factor * self.width
        tokens = self.batch / degrees.microbatches / degrees.dp
        r, h = degrees.tp_residual, degrees.tp_hidden
        for inner, outer, tp_in, tp_out in ((self.width, wide, r, h), (wide, self.width, h, r)):
            inner, outer = inner / tp_in, outer / tp_out
            weights = inner * outer
            flop += 6 * weights * tokens
            moved += 4 * weights
            sent += self._summed(outer * tokens, tp_in) + self._summed(inner * tokens, tp_out)
            summed = self._summed(weights, degrees.dp) * value_bytes
            gradients_s += max(summed / (share * self.memory), summed / self.network)
        block_s = max(
            flop / (share * self.peak), moved * value_bytes / (share * self.memory),
            sent * value_bytes / self.network,
        )  # fmt: skip
        blocks = self.blocks / degrees.pp
        batch_s = (degrees.pp - 1 + blocks * degrees.microbatches) * block_s + blocks * gradients_s
        return float(self.tokens / self.batch * batch_s)

    def utilisation(self, degrees: Degrees) -> float:
        return self.asked.flops / self.seconds(degrees) / (degrees.devices * self.peak)

    def curve(self) -> Iterator[Degrees]:
        """From one device on; those at full utilisation first."""
        factor = self.asked.hidden_factor
        first = [(1, hidden) for hidden in range(1, _FEW_TP)]
        first += [(each, round(each * factor)) for each in range(1, _MOST_TP)]
        degrees = [Degrees(1, 1, r, h, 1) for r, h in first]
        full = [d for d in degrees if self.utilisation(d) >= _FULL * self.asked.utilization]
        if not full:
            raise CostError(
                f"one device does not reach a utilization of {self.asked.utilization:g} on this "
                f"model of {self.params:.3g} parameters: give faster memory, or more FLOPs"
            )
        yield from full
        last = full[-1]
        for _ in range(ceil(max(0.0, log2(self.asked.most_devices / last.devices)))):
            last = min(self._doubled(last), key=self.seconds)
            yield last

    def _doubled(self, last: Degrees) -> Iterator[Degrees]:
        for power in range(_MOST_HALVINGS):
            for place in range(4):
                degrees = [*last[:4], 2**power]
                degrees[place] *= 2
                found = Degrees(*degrees)
                if found.pp <= self.blocks and found.pp <= found.microbatches:
                    yield found


def cost_devices(flops: float, **rates: Any) -> dict[str, Any]:
    """Compute the best degrees and the utilisation by number of devices, by arithmetic alone.

    Args:
        flops: of the run.
        rates: the other fields of `DeviceRun`.

    Returns:
        The run, a row for each number of devices, and the row that ends first.

    Raises:
        TwinstreamError: a number is wrong, or not one device reaches full utilisation.
    """
    asked = DeviceRun(flops, **rates)
    run = _Run(asked)
    rows = [
        {"devices": one.devices, **one._asdict(), "utilization": run.utilisation(one),
         "days": run.seconds(one) / _DAY_S}
        for one in run.curve()
    ]  # fmt: skip
    within = [row for row in rows if row["devices"] <= asked.most_devices]
    return {
        "asked": asdict(asked), "params": run.params, "tokens": run.tokens,
        "batch_tokens": run.batch, "blocks": run.blocks, "width": run.width, "rows": rows,
        "fastest": min(within, key=lambda row: row["days"]),
    }  # fmt: skip
