"""A machine without measurements takes its efficiencies from a fitted relative."""

from collections.abc import Callable

from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.schema import CURVE_OF_RATE, Efficiency, Machine


def borrowed(
    machine: Machine, relative: Machine, note: str, wanted: Callable[[str], bool] = lambda _: True
) -> Machine:
    """The machine's own peaks and rates with the relative's efficiencies, labelled as borrowed.

    Fractions carry over as they are; `half`, the amount at which a launch's ramp costs as much as
    its work, in proportion to the nominal rate, so that the ramp takes the same time. The launch
    latency comes along.

    Args:
        note: what the label adds, such as how far off borrowing was where it could be tested.
        wanted: which curves to borrow, by key; the machine keeps its own of the others.

    Raises:
        CalibrationError: a nominal rate is missing or unconstrained on one of both.
    """
    curves = dict(machine.efficiency)
    for key, curve in relative.efficiency.items():
        if not wanted(key):
            continue
        field = _rate_field(key, curve)
        scale = _nominal(machine, field) / _nominal(relative, field) if curve.half else 1.0
        source = f"borrowed from {relative.name} ({curve.kind}), {note}"
        update = {"half": curve.half * scale, "kind": "assumed", "source": source}
        curves[key] = curve.model_copy(update=update)
    update = {"efficiency": curves}
    latency = relative.launch_latency_ns
    if latency is not None:
        told = f"borrowed from {relative.name} ({latency.kind}), {note}"
        update["launch_latency_ns"] = latency.model_copy(update={"kind": "assumed", "source": told})
    return machine.model_copy(update=update)


def _rate_field(key: str, curve: Efficiency) -> str:
    """The nominal rate of which a curve is a fraction."""
    for field, link in CURVE_OF_RATE.items():
        if key == link:
            return field
    if key.startswith("host_"):
        return "host_dram_bytes_per_s"
    if curve.of == "bytes":
        return "hbm_bytes_per_s"
    return "peak_fp32_flop_per_s" if key.endswith("float32") else "peak_bf16_flop_per_s"


def _nominal(machine: Machine, field: str) -> float:
    number = getattr(machine, field)
    if number is None or number.value is None:
        raise CalibrationError(
            f"machine '{machine.name}' states no {field}, by which borrowed ramps are scaled"
        )
    value: float = number.value
    return value
