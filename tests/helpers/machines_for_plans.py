"""Machines that push a planner to one side or the other."""

from tests.hardware_profiles.machines import curve, number
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine


def fast_link_machine() -> Machine:
    """The CPU with copies that take next to nothing, so that every offload hides."""
    cpu = load_machine("cpu")
    rates = ("pcie_h2d", "pcie_d2h", "pcie_duplex", "host_dram", "hbm")
    curves = ("h2d", "d2h", "duplex", "host_dram")
    update = {f"{name}_bytes_per_s": number(1e15) for name in rates}
    efficiency = {**cpu.efficiency, **{name: curve(1.0, 0, "bytes") for name in curves}}
    return cpu.model_copy(update={**update, "copy_latency_ns": number(0), "efficiency": efficiency})


def slow_link_machine() -> Machine:
    """The CPU with copies so slow that any recompute is faster."""
    slow = {f"pcie_{direction}_bytes_per_s": number(1e6) for direction in ("h2d", "d2h")}
    return load_machine("cpu").model_copy(update=slow)
