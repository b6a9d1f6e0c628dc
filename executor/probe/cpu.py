"""Measure this machine's CPU as the device of the `cpu` backend; the result is a profile."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from statistics import median
from typing import TypeVar

import torch

from twinstream.executor.memory.host_limits import host_limits
from twinstream.executor.probe.cpu_attention import PROBED_ATTENTION, attention_samples
from twinstream.executor.probe.links import copy_line, duplex_bytes_per_s, wake_up_ns
from twinstream.executor.probe.tasks.curves import Ceilings, fit_curves
from twinstream.executor.probe.tasks.kernels import kernel_samples, pace_samples
from twinstream.executor.probe.tasks.task_samples import TaskSample, best_matmul_flop_per_s
from twinstream.executor.probe.timing.fit import Line, fit_line
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.schema import Efficiency, Machine, Number, is_compute_unit

T = TypeVar("T")
_FULL_RATE_CURVES = ("hbm", "h2d", "d2h", "duplex", "host_dram")
_PEAK_FIELDS = {"float32": "peak_fp32_flop_per_s", "bfloat16": "peak_bf16_flop_per_s"}


def probe_cpu(dtypes: Sequence[str] = ()) -> Machine:
    """The profile of this machine's CPU, from some seconds of measurements on random data.

    float32 is measured whatever `dtypes` are: every plan has norms and sums in it.
    Peaks are those of matmul at the largest size measured; every unit of work of the executor's
    kernels has its own curve. What a copy or a wake-up costs is a latency; what a kernel launch
    costs is in the unit's curve.
    """
    return _in_a_thread(lambda: _probed(dtypes))


def cpu_pace(machine: Machine) -> float:
    """Return the CPU's speed now, relative to a profile: the median of some of its kernels.

    Raises:
        MissingNumberError: the profile lacks a number of one of them.
    """
    samples = _in_a_thread(lambda: list(pace_samples("float32")))
    return median(work_time(s.works[0], machine).alone_ns / s.time_ns for s in samples)


def _in_a_thread(measure: Callable[[], T]) -> T:
    """Measure as the streams of a run compute: in a thread, whose memory the C library keeps apart
    and which has no intra-op threads beside it."""
    with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(1)) as pool:
        return pool.submit(measure).result()


def _probed(dtypes: Sequence[str]) -> Machine:
    date = datetime.now(UTC).date().isoformat()
    source = f"probed {date}, torch {torch.__version__}, 1 compute thread"
    copies = copy_line()
    copy_rate = 1e9 / copies.ns_per_unit
    numbers = {
        "hbm_bytes_per_s": 2 * copy_rate,
        "pcie_h2d_bytes_per_s": copy_rate,
        "pcie_d2h_bytes_per_s": copy_rate,
        "pcie_duplex_bytes_per_s": min(2 * copy_rate, max(copy_rate, duplex_bytes_per_s())),
        "copy_latency_ns": copies.fixed_ns,
        "event_wait_latency_ns": wake_up_ns(),
        "launch_latency_ns": 0.0,
        "device_reserve_bytes": 0.0,
        **_memory_bytes(),
    }
    numbers["host_dram_bytes_per_s"] = 2 * numbers["pcie_duplex_bytes_per_s"]
    curves = {name: _curve(1.0, 0.0, source) for name in _FULL_RATE_CURVES}
    for dtype in dict.fromkeys(("float32", *dtypes)):
        samples = list(kernel_samples(dtype))
        numbers[_PEAK_FIELDS[dtype]] = peak = best_matmul_flop_per_s(samples)
        ceilings = Ceilings(peak, numbers["hbm_bytes_per_s"], numbers["hbm_bytes_per_s"], 0.0)
        curves |= dict(_unit_curves(samples, dtype, ceilings, source))
        curves |= dict(_host_curves(samples, numbers["host_dram_bytes_per_s"], source))
    numbers["host_peak_fp32_flop_per_s"] = numbers[_PEAK_FIELDS["float32"]]
    return Machine.model_validate(
        {
            "name": "cpu-probed",
            "description": "This machine's CPU; a second host arena plays the device.",
            "device": "cpu",
            **{
                name: Number(
                    value=value,
                    kind="measured",
                    source=f"{source}; copies {copies.residual:.0%} off a line"
                    if name.startswith(("pcie", "copy"))
                    else source,
                )
                for name, value in numbers.items()
            },
            "efficiency": curves,
        }
    )


def _unit_curves(
    samples: Sequence[TaskSample], dtype: str, ceilings: Ceilings, source: str
) -> Iterator[tuple[str, Efficiency]]:
    """Of matmul and attention by FLOPs and depth together, of every other unit by its bytes."""
    by_unit: dict[str, list[TaskSample]] = {}
    for sample in samples:
        by_unit.setdefault(sample.works[0].unit, []).append(sample)
    products = [by_unit.pop(unit) for unit in tuple(by_unit) if is_compute_unit(unit)]
    together = [*(one for found in products for one in found), *attention_samples(dtype)]
    fit = fit_curves(together, ceilings, source, attention_starts=True)
    yield from fit.curves.items()
    for unit in ("attention_forward", "attention_backward"):  # the widest heads' for others
        widest = max((key for key in fit.curves if key.startswith(unit)), key=_head_dim)
        yield f"{unit}/{PROBED_ATTENTION}/{dtype}", fit.curves[widest]
    for unit, found in by_unit.items():
        line = _line(found)
        maximum, half = line.efficiency(ceilings.hbm_bytes_per_s)
        curve = _curve(maximum, half, f"{source}, worst residual {line.residual:.0%}")
        yield f"{unit}/{dtype}", curve


def _host_curves(
    samples: Sequence[TaskSample], dram_bytes_per_s: float, source: str
) -> Iterator[tuple[str, Efficiency]]:
    """Of what the host computes beside the device, by the same kernels, in a thread of its own."""
    for unit, curve in (("adamw", "host_adamw"), ("gradient_squares", "host_vector")):
        if found := [sample for sample in samples if sample.works[0].unit == unit]:
            maximum, half = _line(found).efficiency(dram_bytes_per_s)
            yield curve, _curve(maximum, half, source)


def _curve(maximum: float, half: float, source: str) -> Efficiency:
    return Efficiency(max=maximum, half=half, of="bytes", kind="measured", source=source)


def _head_dim(key: str) -> int:
    """Of a curve's key: attention_forward/eager/head_dim_64/float32."""
    return int(key.split("/head_dim_")[1].split("/")[0])


def _line(samples: Sequence[TaskSample]) -> Line:
    """Time per launch over the bytes per launch."""
    works = [sample.works[0] for sample in samples]
    amounts = [work.hbm_bytes / work.launches for work in works]
    times = [sample.time_ns / work.launches for sample, work in zip(samples, works, strict=True)]
    return fit_line(amounts, times)


def _memory_bytes() -> dict[str, float]:
    """Half of what is available for each of the two arenas."""
    free = host_limits().free_bytes
    if free is None:
        return {}
    return {"device_memory_bytes": free / 2, "host_memory_bytes": free / 2}
