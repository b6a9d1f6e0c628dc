"""Measure this machine's CPU as the device of the `cpu` backend; the result is a profile."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from twinstream.executor.host_limits import host_limits
from twinstream.executor.probe.fit import Line, fit_line
from twinstream.executor.probe.kernels import Sample, kernel_samples
from twinstream.executor.probe.links import copy_line, duplex_bytes_per_s, wake_up_ns
from twinstream.hardware_profiles.schema import Efficiency, Machine, Number, is_compute_unit

_PEAK_FIELDS = {"float32": "peak_fp32_flop_per_s", "bfloat16": "peak_bf16_flop_per_s"}


def probe_cpu(compute_threads: int = 1, dtypes: Sequence[str] = ("float32",)) -> Machine:
    """The profile of this machine's CPU, from some seconds of measurements on random data.

    Peaks are those of matmul at the largest size measured; every unit of work of the executor's
    kernels has its own curve. What a copy or a wake-up costs is a latency; what a kernel launch
    costs is in the unit's curve.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(compute_threads)
    try:
        return _Probe(compute_threads).run(dtypes)
    finally:
        torch.set_num_threads(threads_before)


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
        curves = {name: self._curve(1.0, 0.0, "bytes") for name in _FULL_RATE_CURVES}
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
        by_unit: dict[str, list[Sample]] = {}
        for sample in samples:
            by_unit.setdefault(sample.work.unit, []).append(sample)
        for unit, found in by_unit.items():
            compute = is_compute_unit(unit)
            line = _line(found, compute=compute)
            maximum, half = line.efficiency(peak if compute else hbm)
            of = "flops" if compute else "bytes"
            curve = self._curve(maximum, half, of, f", worst residual {line.residual:.0%}")
            curve = curve.model_copy(update={"implementation": found[0].work.implementation})
            yield f"{unit}/{dtype}", curve
            if unit == "swiglu":  # the unit whose mix of reads, writes and exp is most ordinary
                yield f"vector/{dtype}", curve

    def _curve(self, maximum: float, half: float, of: str, more: str = "") -> Efficiency:
        return Efficiency(
            max=maximum, half=half, of="flops" if of == "flops" else "bytes", kind="measured",
            source=self._source + more,
        )  # fmt: skip


_FULL_RATE_CURVES = ("hbm", "h2d", "d2h", "duplex", "host_dram")


def _line(samples: Sequence[Sample], *, compute: bool) -> Line:
    """Time per launch over the amount per launch."""
    works = [sample.work for sample in samples]
    amounts = [(w.flops if compute else w.hbm_bytes) / w.launches for w in works]
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
