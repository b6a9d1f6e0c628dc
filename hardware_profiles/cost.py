"""Time of work and copies alone on a machine, in nanoseconds; contention is the simulator's."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from twinstream.hardware_profiles.curve_choice import ATTENTION_RANK, ChosenCurve, curve_for
from twinstream.hardware_profiles.errors import UnknownDtypeError
from twinstream.hardware_profiles.memories import LINKS, MemoryLink
from twinstream.hardware_profiles.schema import (
    CURVE_OF_RATE,
    NARROW_PEAKS,
    Efficiency,
    Machine,
)
from twinstream.schedule.cost import GROUPED_TILE_ROWS, Work
from twinstream.schedule.ops import KernelCall

# float16 runs on the same tensor cores at the same rate as bfloat16 on every shipped machine.
# float32 is plain float32: a profile that wants TF32 states it as its float32 peak.
PEAK_OF_DTYPE = {
    "bfloat16": "peak_bf16_flop_per_s",
    "float16": "peak_bf16_flop_per_s",
    "float32": "peak_fp32_flop_per_s",
    "fp8": "peak_fp8_flop_per_s",
    "fp4": "peak_fp4_flop_per_s",
}
_MATMUL_RANK = 3
_LINKS = {link.name: link for link in LINKS}


@dataclass(frozen=True, slots=True)
class WorkTime:
    """Time of work alone, by cause. Arithmetic and memory traffic overlap; launches do not."""

    compute_ns: float
    memory_ns: float
    launch_ns: float

    @property
    def alone_ns(self) -> float:
        return max(self.compute_ns, self.memory_ns) + self.launch_ns


def work_time(work: Work, machine: Machine) -> WorkTime:
    """Time of one group of like kernels that has the machine to itself.

    A unit whose curve is `of` "flops" (matmul and attention always are) computes at
    peak(dtype) x sustained x curve(FLOPs per launch, depth of the inner loop) and moves bytes at
    HBM x `hbm` curve(bytes per launch). Attention of an implementation that the profile has no rate
    of is priced by another's, times what is assumed of the two (`attention_rates`).
    What is multiplied in fp8 or fp4 takes bf16's curve where it has none of its own, at its peak.
    A unit whose curve is `of` "bytes" (norms, activations, optimizer, embedding, loss) moves bytes
    at HBM x curve(bytes per launch), at most at the usable HBM rate, and computes at the float32
    peak, since the vector cores do such arithmetic in float32 whatever the dtype in memory.
    Work with neither bytes nor FLOPs of a kind takes none of that kind's time or numbers.

    Raises:
        MissingNumberError: the profile lacks a number that this work needs.
        UnknownDtypeError: no peak belongs to the dtype.

    >>> from twinstream.hardware_profiles.loader import load_machine
    >>> square = Work(unit="matmul", shape=(8192,) * 3, flops=2 * 8192**3,
    ...               hbm_bytes=3 * 2 * 8192**2, launches=1)
    >>> round(work_time(square, load_machine("h100")).alone_ns / 1e6, 1)  # ms
    1.6
    """
    return WorkTime(
        compute_ns=_compute_ns(work, machine) if work.flops else 0.0,
        memory_ns=_memory_ns(work, machine) if work.hbm_bytes else 0.0,
        launch_ns=work.launches * machine.number("launch_latency_ns") if work.launches else 0.0,
    )


def cost_alone_ns(works: Iterable[Work], machine: Machine) -> float:
    """Time of a task alone: its groups of kernels run one after the other."""
    return sum((work_time(work, machine).alone_ns for work in works), 0.0)


def call_alone_ns(call: KernelCall, machine: Machine) -> float:
    """Time in ns of a kernel call alone on the processor it runs on.

    Raises:
        MissingNumberError: the profile lacks a number that this call needs.
    """
    if call.processor == "host":
        return sum((host_work_ns(work, machine) for work in call.cost), 0.0)
    return cost_alone_ns(call.cost, machine)


def host_work_ns(work: Work, machine: Machine) -> float:
    """Time in ns of one group of like kernels that has the host CPU to itself.

    It moves bytes at host DRAM x curve(bytes per launch), at most at the usable DRAM rate, and
    computes at the host's float32 peak; the slower of the two counts. The curve is that of the
    unit with `host_` before its name, or `host_vector`. A call on the CPU costs no launch.

    Raises:
        MissingNumberError: the profile lacks a number that this work needs.
    """
    compute_ns = 0.0
    if work.flops:
        compute_ns = work.flops * 1e9 / machine.number("host_peak_fp32_flop_per_s")
    nominal = machine.number("host_dram_bytes_per_s") if work.host_dram_bytes else math.inf
    if math.isinf(nominal):
        return compute_ns
    curve = machine.curve(f"host_{work.unit}", "host_vector")
    own_ns = _time_ns(work.host_dram_bytes, work.launches, nominal, curve)
    dram_ns = work.host_dram_bytes * 1e9 / machine.rate("host_dram_bytes_per_s")
    return max(compute_ns, own_ns, dram_ns)


def copy_alone_ns(size_bytes: int, direction: str, machine: Machine) -> float:
    """Time of one copy over a link (`h2d`, `d2h`, `disk` reads, `disk_write`) that has the machine
    to itself, between two memories, pinned where it is the host's.

    The link's latency plus the bytes at the slowest of the link in its direction (with its curve
    over bytes per copy, where it has one) and of what it shares: the link's duplex limit, host DRAM
    and HBM; of a read or a write of a disk host DRAM.

    Raises:
        MissingNumberError: the profile lacks a number that a copy needs.
    """
    link = _LINKS[direction]
    latency_ns = machine.number(link.latency_field)
    if size_bytes == 0:
        return latency_ns
    slowest = min(machine.rate(field) for _, field in link.shared)
    link_ns = _link_ns(size_bytes, link, machine)
    return latency_ns + max(link_ns, size_bytes * 1e9 / slowest)


def device_copy_alone_ns(size_bytes: int, machine: Machine) -> float:
    """Time of one copy inside device memory alone: a launch, and its bytes read and written.

    Raises:
        MissingNumberError: the profile lacks a number that such a copy needs.
    """
    launch_ns = machine.number("launch_latency_ns")
    return launch_ns + 2 * size_bytes * 1e9 / machine.rate("hbm_bytes_per_s")


def _compute_ns(work: Work, machine: Machine) -> float:
    chosen = curve_for(work, machine)
    if chosen.curve.of == "bytes":
        return work.flops * 1e9 / machine.number("peak_fp32_flop_per_s")
    curve = _of_dtype(chosen, work, machine)
    flops = work.flops * (1.0 + _shallowness(work, curve)) * _padding(work)
    flops += diagonal_flops(work) * curve.diagonal
    rate = machine.rate(_peak_field(work)) * chosen.ratio.value
    return _time_ns(flops, work.launches, rate, curve)


def _of_dtype(chosen: ChosenCurve, work: Work, machine: Machine) -> Efficiency:
    """The curve, or of fp8 and fp4 that of bf16 whose launches and output tiles cost the same time,
    so more FLOPs, if the profile states none of their own."""
    field, curve = _peak_field(work), chosen.curve
    if field not in NARROW_PEAKS or chosen.key.endswith(f"/{work.dtype}"):
        return curve
    faster = machine.number(field) / machine.number("peak_bf16_flop_per_s")
    if not math.isfinite(faster):
        return curve
    update = {"half": curve.half * faster, "half_depth": curve.half_depth * faster}
    return curve.model_copy(update=update)


def _shallowness(work: Work, curve: Efficiency) -> float:
    """half_depth / depth: what starting and ending output tiles adds to the FLOPs, a fraction."""
    if not curve.half_depth:
        return 0.0
    if depth := inner_depth(work):
        return curve.half_depth / depth
    return 0.0


def _padding(work: Work) -> float:
    """Return what experts' last tiles, half empty, cost; in a probe's samples all are full."""
    if work.unit != "grouped_matmul" or work.launches > 1:
        return 1.0
    return 1.0 + GROUPED_TILE_ROWS / 2 / work.shape[0]


def inner_depth(work: Work) -> float | None:
    """Steps of the inner loop of an output element; None where the shape does not tell.

    K of a matmul [M, K] x [K, N], of each of a grouped one; of causal attention the mean number of
    keys of a query.
    """
    if work.unit.startswith("attention") and len(work.shape) == ATTENTION_RANK:
        queries, context = work.shape[:2]
        return context - queries / 2
    rank = _MATMUL_RANK + work.unit.startswith("grouped")
    if "matmul" in work.unit and len(work.shape) == rank:
        return work.shape[2]
    return None


def diagonal_flops(work: Work) -> float:
    """Return causal attention's FLOPs among the queries' own keys; 0 of anything else."""
    depth = inner_depth(work)
    if depth and work.unit.startswith("attention"):
        return work.flops * work.shape[0] / 2 / depth
    return 0.0


def _memory_ns(work: Work, machine: Machine) -> float:
    nominal = machine.number("hbm_bytes_per_s")
    if math.isinf(nominal):
        return 0.0
    curve, hbm_curve = curve_for(work, machine).curve, machine.curve("hbm")
    if curve.of == "flops":
        return _time_ns(work.hbm_bytes, work.launches, nominal, hbm_curve)
    own_ns = _time_ns(work.hbm_bytes, work.launches, nominal, curve)
    return max(own_ns, work.hbm_bytes * 1e9 / (nominal * hbm_curve.max))


def _link_ns(size_bytes: int, link: MemoryLink, machine: Machine) -> float:
    nominal = machine.number(link.rate_field)
    if math.isinf(nominal):
        return 0.0
    if link.rate_field not in CURVE_OF_RATE:
        return size_bytes * 1e9 / nominal
    return _time_ns(size_bytes, 1, nominal, machine.curve(CURVE_OF_RATE[link.rate_field]))


def _peak_field(work: Work) -> str:
    if work.dtype not in PEAK_OF_DTYPE:
        raise UnknownDtypeError(
            f"work of unit '{work.unit}' has dtype '{work.dtype}', for which profiles state no "
            f"peak. Known dtypes: {', '.join(PEAK_OF_DTYPE)}."
        )
    return PEAK_OF_DTYPE[work.dtype]


def _time_ns(amount: float, launches: int, nominal_per_s: float, curve: Efficiency) -> float:
    """amount / (nominal x curve(amount / launches)), without its singularity at zero launches."""
    return (amount + launches * curve.half) * 1e9 / (nominal_per_s * curve.max)
