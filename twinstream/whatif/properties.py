"""Properties of a machine and its caps that money can change, and a request with one changed."""

from dataclasses import dataclass, replace
from math import isinf

from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.link import D2H, DUPLEX, H2D, LINK_FIELDS
from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.planner.policies import ON_DEVICE, optimizer_places
from twinstream.planner.request import PlanRequest
from twinstream.schedule.document import Schedule
from twinstream.simulator.replay import simulate

_GIB, _GB = 2**30, 1e9


@dataclass(frozen=True)
class Property:
    """A cap or some numbers of the machine that change together.

    `fields` are of the machine's profile, none for a cap. `price_of` names the price in the lower
    bound, if it has one; a price is for one more `unit` of the value shown.
    """

    name: str
    unit: str
    unit_size: float
    fields: tuple[str, ...] = ()
    price_of: str | None = None
    lower_is_better: bool = False


def properties_of(request: PlanRequest) -> list[Property]:
    """What can be changed: the caps, and numbers that the profile limits and the plan uses."""
    caps = request.caps
    found = []
    if caps.device_bytes is not None:
        found.append(Property("device memory", "GiB", _GIB, price_of="device"))
    if caps.host_bytes is not None:
        found.append(Property("host memory", "GiB", _GIB, price_of="host"))
    peak = PEAK_OF_DTYPE[request.spec.dtype]
    on_host = optimizer_places(request.policy)[0] not in ON_DEVICE
    numbers = [
        Property("PCIe, all three", "GB/s H2D", _GB, LINK_FIELDS),
        Property("PCIe H2D", "GB/s", _GB, (H2D,), "h2d"),
        Property("PCIe D2H", "GB/s", _GB, (D2H,), "d2h"),
        Property("PCIe, both ways", "GB/s", _GB, (DUPLEX,), "pcie"),
        # The bound's price of HBM is for what copies and kernels draw together, not for the kernels
        # that it alone makes slow: it would mislead beside the difference.
        Property("HBM", "GB/s", _GB, ("hbm_bytes_per_s",)),
        Property("host DRAM", "GB/s", _GB, ("host_dram_bytes_per_s",), "host_dram"),
        Property("compute peak", "TFLOP/s", 1e12, (peak,)),
        Property("launch latency", "us", 1e3, ("launch_latency_ns",), lower_is_better=True),
        Property("copy latency", "us", 1e3, ("copy_latency_ns",), lower_is_better=True),
    ]
    if on_host:
        numbers.append(Property("host CPU peak", "TFLOP/s", 1e12, ("host_peak_fp32_flop_per_s",)))
    return found + [one for one in numbers if _is_limited(request.machine, one)]


def _is_limited(machine: Machine, one: Property) -> bool:
    stated = [getattr(machine, field) is not None for field in one.fields]
    return all(stated) and not any(
        isinf(value) or value == 0 for value in map(machine.number, one.fields)
    )


def value_of(request: PlanRequest, one: Property) -> float:
    """In bytes, bytes per s, FLOP/s or ns; of several fields the first one's."""
    if one.fields:
        return request.machine.number(one.fields[0])
    size = request.caps.device_bytes if one.price_of == "device" else request.caps.host_bytes
    assert size is not None
    return float(size)


def changed(request: PlanRequest, one: Property, factor: float) -> PlanRequest:
    """The request with a property times a factor; a memory that grows is as large as its cap."""
    if one.fields:
        changes = {field: request.machine.number(field) * factor for field in one.fields}
        return replace(request, machine=override(request.machine, changes))
    name = f"{one.price_of}_bytes"
    size = round(value_of(request, one) * factor)
    return replace(request, caps=request.caps.model_copy(update={name: size}))


def yield_of(schedule: Schedule, request: PlanRequest) -> Summary:
    """What a plan, made for whatever machine, comes to on the machine of a request."""
    return summarize(schedule, simulate(schedule, request.machine), request.machine)
