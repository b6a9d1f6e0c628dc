"""The constants that are fitted to published steps, one set for all models of a GPU type.

Each has a physical meaning and bounds. They are numbers of profiles, of a node's machine and of the
cluster, and nothing else: what is fitted is shipped as such, with where it is from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Efficiency, Machine, Number

_LINKS = ("hbm", "h2d", "d2h", "duplex", "host_dram", "host_adamw", "host_vector")


@dataclass(frozen=True)
class Constant:
    """One constant: what it means, in which unit, and between which bounds it makes sense."""

    name: str
    meaning: str
    low: float
    high: float
    start: float


CONSTANTS = (
    Constant("sustained", "share of the bf16 peak that the board's power limit sustains",
             0.5, 1.0, 0.75),
    Constant("matmul_ramp_us", "what a matrix product takes to fill and drain the SMs, us",
             0.2, 20.0, 5.0),
    Constant("attention", "share of the sustained rate that attention reaches, forward",
             0.2, 1.2, 0.7),
    Constant("elementwise", "share of HBM's nominal rate that elementwise kernels reach",
             0.4, 0.95, 0.8),
    Constant("launch_us", "between two kernels of a stream, us", 0.5, 12.0, 2.0),
    Constant("network", "share of the NICs' nominal rate that large collectives reach",
             0.4, 1.0, 0.9),
    Constant("compute_lost", "share of compute that a running collective takes", 0.0, 0.4, 0.1),
    Constant("tp_exposed", "share of tp's collectives waited for where they overlap products",
             0.0, 1.0, 0.5),
)  # fmt: skip


def with_constants(
    machine: Machine, cluster: Cluster, values: Mapping[str, float], source: str
) -> tuple[Machine, Cluster]:
    """A node and its cluster with the constants in place of their own numbers."""
    curves = dict(machine.efficiency)
    sustained, ramp_us = values["sustained"], values["matmul_ramp_us"]
    curves["sustained"] = Efficiency(
        max=sustained, half=0.0, of="flops", kind="fitted", source=source
    )
    peak = machine.number("peak_bf16_flop_per_s") * sustained
    vector = machine.curve("vector").max
    attention = machine.curve("attention_forward").max
    for key, curve in machine.efficiency.items():
        change: dict[str, float] = {}
        if key == "matmul":
            change = {"half": ramp_us * 1e-6 * peak * curve.max}
        elif key.startswith("attention") and "float32" not in key:
            change = {"max": min(1.5, values["attention"] * curve.max / attention)}
        elif curve.of == "bytes" and key not in _LINKS:
            change = {"max": min(1.5, values["elementwise"] * curve.max / vector)}
        if change:
            curves[key] = curve.model_copy(update={**change, "kind": "fitted", "source": source})

    def number(value: float) -> Number:
        return Number(value=value, kind="fitted", source=source)

    of_node = {"efficiency": curves, "launch_latency_ns": number(values["launch_us"] * 1e3)}
    of_cluster = {
        "network_efficiency": number(values["network"]),
        "compute_lost": number(values["compute_lost"]),
        "tp_exposed": number(values["tp_exposed"]),
    }
    return machine.model_copy(update=of_node), cluster.model_copy(update=of_cluster)
