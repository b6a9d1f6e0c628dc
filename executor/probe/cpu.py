"""Measure this machine's CPU as the device of the `cpu` backend; the result is a profile."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from twinstream.executor.memory.host_limits import host_limits
from twinstream.executor.probe.cpu_attention import PROBED_ATTENTION, attention_samples
from twinstream.executor.probe.links import copy_line, duplex_bytes_per_s, wake_up_ns
from twinstream.executor.probe.tasks.curves import Ceilings, fit_curves
from twinstream.executor.probe.tasks.kernels import Sample, kernel_samples, pace_samples
from twinstream.executor.probe.tasks.task_samples import TaskSample
from twinstream.executor.probe.timing.fit import Line, fit_line
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.schema import Efficiency, Machine, Number

T = TypeVar("T")
_PEAK_FIELDS = {"float32": "peak_fp32_flop_per_s", "bfloat16": "peak_bf16_flop_per_s"}


def probe_cpu(compute_threads: int = 1, dtypes: Sequence[str] = ("float32",)) -> Machine:
    """The profile of this machine's CPU, from some seconds of measurements on random data.

    Peaks are those of matmul at the largest size measured; every unit of work of the executor's
    kernels has its own curve. What a copy or a wake-up costs is a latency; what a kernel launch
    costs is in the unit's curve.
    """
    return _in_a_thread(lambda: _Probe(compute_threads).run(dtypes), compute_threads)


def cpu_pace(machine: Machine, compute_threads: int = 1) -> float:
    """How fast the CPU is now, of what a profile says: the median over some of the probe's kernels.

    Raises:
        MissingNumberError: the profile lacks a number of one of them.
    """
    samples = _in_a_thread(lambda: list(pace_samples("float32")), compute_threads)
    return median(work_time(s.work, machine).alone_ns / s.time_ns for s in samples)


def _in_a_thread(measure: Callable[[], T], compute_threads: int) -> T:
    """Measure as the streams of a run compute: in a thread, whose memory the C library keeps apart
    and whose number of intra-op threads is its own."""
    with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(compute_threads)) as pool:
        return pool.submit(measure).result()


class _Probe:
    def __init__(self, compute_threads: int) -> None:
        date = datetime.now(UTC).date().isoformat()
        self._source = (
            f"probed {date}, torch {torch.__version__}, {compute_threads} compute thread(s)"
        )

    def run(self, dtypes: Sequence[str]) -> Machine:
        copies = copy_line()
        copy_rate = 1e9 / copies.ns_per_unit
        numbers = {
            "hbm_bytes_per_s": 2 * copy_rate,
            "pcie_h2d_bytes_per_s": copy_rate,
            "pcie_d2h_bytes_per_s": copy_rate,
            "pcie_duplex_bytes_per_s": max(copy_rate, duplex_bytes_per_s()),
            "copy_latency_ns": copies.fixed_ns,
            "event_wait_latency_ns": wake_up_ns(),
            "launch_latency_ns": 0.0,
            "device_reserve_bytes": 0.0,
            **_memory_bytes(),
        }
        numbers["host_dram_bytes_per_s"] = 2 * numbers["pcie_duplex_bytes_per_s"]
        curves = {name: self._curve(1.0, 0.0) for name in _FULL_RATE_CURVES}
        for dtype in dtypes:
            samples = list(kernel_samples(dtype))
            numbers[_PEAK_FIELDS[dtype]] = peak = _peak(samples)
            curves |= dict(self._unit_curves(samples, dtype, peak, numbers["hbm_bytes_per_s"]))
        return Machine.model_validate(
            {
                "name": "cpu-probed",
                "description": "This machine's CPU; a second host arena plays the device.",
                "device": "cpu",
                **{
                    name: Number(value=value, kind="measured", source=self._source)
                    for name, value in numbers.items()
                },
                "efficiency": curves,
            }
        )

    def _unit_curves(
        self, samples: Sequence[Sample], dtype: str, peak: float, hbm: float
    ) -> Iterator[tuple[str, Efficiency]]:
        """Of matmul and attention by FLOPs and depth together, of every other unit by its bytes."""
        by_unit: dict[str, list[Sample]] = {}
        for sample in samples:
            by_unit.setdefault(sample.work.unit, []).append(sample)
        products = [
            TaskSample(f"matmul {i}", (sample.work,), sample.time_ns)
            for i, sample in enumerate(by_unit.pop("matmul"))
        ]
        fit = fit_curves(
            [*products, *attention_samples(dtype)],
            Ceilings(peak, hbm, hbm, launch_ns=0.0),
            self._source,
            attention_starts=True,
        )
        yield from fit.curves.items()
        for unit in ("attention_forward", "attention_backward"):  # the widest heads' for others
            widest = max((key for key in fit.curves if key.startswith(unit)), key=_head_dim)
            yield f"{unit}/{PROBED_ATTENTION}/{dtype}", fit.curves[widest]
        for unit, found in by_unit.items():
            line = _line(found)
            maximum, half = line.efficiency(hbm)
            curve = self._curve(maximum, half, f", worst residual {line.residual:.0%}")
            yield f"{unit}/{dtype}", curve
            if unit == "swiglu":  # the unit whose mix of reads, writes and exp is most ordinary
                yield f"vector/{dtype}", curve

    def _curve(self, maximum: float, half: float, more: str = "") -> Efficiency:
        return Efficiency(
            max=maximum, half=half, of="bytes", kind="measured", source=self._source + more
        )


_FULL_RATE_CURVES = ("hbm", "h2d", "d2h", "duplex", "host_dram")


def _head_dim(key: str) -> int:
    """Of a curve's key: attention_forward/eager/head_dim_64/float32."""
    return int(key.split("/head_dim_")[1].split("/")[0])


def _line(samples: Sequence[Sample]) -> Line:
    """Time per launch over the bytes per launch."""
    amounts = [sample.work.hbm_bytes / sample.work.launches for sample in samples]
    times = [sample.time_ns / sample.work.launches for sample in samples]
    return fit_line(amounts, times)


def _peak(samples: Sequence[Sample]) -> float:
    """The best matmul rate seen."""
    rates = [s.work.flops / s.time_ns * 1e9 for s in samples if s.work.unit == "matmul"]
    return max(rates)


def _memory_bytes() -> dict[str, float]:
    """Half of what is available for each of the two arenas."""
    limits = host_limits(Path("/"))
    known = [b for b in (limits.available_bytes, limits.cgroup_left_bytes) if b is not None]
    if not known:
        return {}
    return {"device_memory_bytes": min(known) / 2, "host_memory_bytes": min(known) / 2}
