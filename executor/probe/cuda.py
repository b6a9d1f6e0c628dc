"""Measure a CUDA device, its memory, its links and the executor's kernels; the result is a profile.

Everything runs on random data, and every kernel after the device has been loaded for a stated time,
so that what a power limit leaves is what is measured.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns

import torch

from twinstream.executor.memory.device_memory import fix_library_workspaces
from twinstream.executor.memory.host_limits import host_limits
from twinstream.executor.probe.cuda_links import Copies, Links, measure_links
from twinstream.executor.probe.tasks.curves import Ceilings, CurveFit, fit_curves
from twinstream.executor.probe.tasks.kernels import host_update_sample
from twinstream.executor.probe.tasks.sample_log import SampleLog
from twinstream.executor.probe.tasks.task_samples import (
    TaskSample,
    attention_samples,
    best_matmul_flop_per_s,
    grouped_samples,
    matmul_samples,
    task_samples,
)
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.executor.probe.timing.fit import Line
from twinstream.executor.run.device_state import DeviceState, StateWatch, cuda_reader
from twinstream.hardware_profiles.curve_choice import implementation_in
from twinstream.hardware_profiles.link import D2H, DUPLEX, DUPLEX_SHARE, H2D
from twinstream.hardware_profiles.schema import (
    FEED_BYTES,
    ComputeCapability,
    Efficiency,
    Machine,
    Number,
)
from twinstream.schedule.chain import Chain

_RESERVE_MARGIN_BYTES = 256 * 2**20  # of streams, events and graphs of a run, and rounding
_UNMEASURED_FP32 = Number(
    kind="unconstrained", source="not probed: vector kernels are priced by the bytes they move"
)
_PEAK = "peak_bf16_flop_per_s"


@dataclass(frozen=True)
class ProbeRequest:
    """One probe of a device: chains of one layer, the datasheet's machine, and how long to load it.

    `datasheet` gives the nominal rates that MFU and efficiencies are of, where the device is known.
    The device is loaded for `warm_seconds`, whose later half gives the rate that it sustains, and
    for `load_seconds` again before each sample.
    Of `attention_chains`, which name other attentions, only these are measured, and of
    `expert_chains` only the products of experts: what both make of the fit is curves of their own.
    Each sample is in the file `samples` before the next is taken, and those of a probe that was cut
    are not measured again.
    `excess_bytes` are what the chosen kernels take beyond what plans count with: also reserved.
    """

    chains: Sequence[Chain]
    datasheet: Machine | None
    commit: str
    date: str
    warm_seconds: float = 4.0
    load_seconds: float = 0.2
    excess_bytes: int = 0
    attention_chains: Sequence[Chain] = ()
    expert_chains: Sequence[Chain] = ()
    samples: Path | None = None


@dataclass(frozen=True)
class Sustained:
    """The rate of matrix products that the device keeps up, and its state meanwhile."""

    flop_per_s: float
    state: DeviceState | None = None


@dataclass
class Probed:
    """The profile, and every figure it was fitted to."""

    machine: Machine
    links: Links
    samples: list[TaskSample]
    sustained: Sustained
    ratios: dict[str, float] = field(default_factory=dict)


def probe_cuda(request: ProbeRequest, device: torch.device) -> Probed:
    """The profile of a CUDA device and its host, in a minute or so.

    Raises:
        HostMemoryError: 512 MiB of host memory cannot be pinned.
    """
    fix_library_workspaces()
    before = _used_bytes(device)
    links = measure_links(device)
    reader = cuda_reader(device)
    load, flops = matmul_load(device)
    sustained = sustained_rate(
        DeviceTimer(device, reader=reader), load, flops, request.warm_seconds
    )
    timer = DeviceTimer(device, load=load, load_s=request.load_seconds, reader=reader)
    log = SampleLog(request.samples, _where(request, device))
    samples = list(kernel_samples(request.chains, timer, log))
    for chain in request.attention_chains:
        samples += attention_samples(chain, timer, log)
    for chain in request.expert_chains:
        samples += grouped_samples(chain, timer, log)
    del load, timer
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    reserve = _used_bytes(device) + _RESERVE_MARGIN_BYTES + request.excess_bytes
    where = f"probed {request.date} on {_where(request, device)}"
    machine, fit = _machine(request, links, (samples, sustained), where)
    memory = {
        "device_reserve_bytes": float(max(reserve, before)),
        **memory_bytes(
            torch.cuda.mem_get_info(device)[1], host_limits().free_bytes,
            is_unified=bool(torch.cuda.get_device_properties(device).is_integrated),
        ),
    }  # fmt: skip
    numbers = {name: _measured(value, where) for name, value in memory.items()}
    numbers["host_peak_fp32_flop_per_s"] = _host_rate(where)
    return Probed(machine.model_copy(update=numbers), links, samples, sustained, fit.ratios)


def _where(request: ProbeRequest, device: torch.device) -> str:
    """What measures, and how."""
    return (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, commit "
        f"{request.commit or 'unknown'}, {request.load_seconds:g} s of load before each sample"
    )


def kernel_samples(
    chains: Iterable[Chain], timer: DeviceTimer, log: SampleLog | None = None
) -> Iterator[TaskSample]:
    """Matrix products, attention and whole kernels of the chains, under the timer's load; equal
    work once."""
    log = log or SampleLog()
    for chain in chains:
        yield from matmul_samples(chain, timer, log)
        yield from attention_samples(chain, timer, log)
        yield from task_samples(chain, timer, log)
        if timer.device.type == "cuda":
            torch.cuda.empty_cache()


def sustained_rate(
    timer: DeviceTimer, load: Callable[[], object], flops: int, seconds: float
) -> Sustained:
    """The rate over the later half of so many seconds of load, when power limits bind."""
    timer.rates_ns(load, seconds / 2)
    with StateWatch(timer.reader) as watch:
        start_ns = perf_counter_ns()
        batches = timer.rates_ns(load, seconds / 2)
        (state,) = watch.between([start_ns, perf_counter_ns()])
    mean_ns = sum(batches) / len(batches)
    return Sustained(flops / mean_ns * 1e9, state)


def matmul_load(device: torch.device) -> tuple[Callable[[], object], int]:
    """Return a call that runs one large matrix product, and the FLOPs of that product."""
    size = 8192 if device.type == "cuda" else 256
    x = torch.randn(size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(x)
    return lambda: torch.mm(x, x, out=out), 2 * size**3


def _machine(
    request: ProbeRequest,
    links: Links,
    kernels: tuple[Sequence[TaskSample], Sustained],
    where: str,
) -> tuple[Machine, CurveFit]:
    samples, kept_up = kernels
    sheet = request.datasheet
    best = max(kept_up.flop_per_s, best_matmul_flop_per_s(samples))
    peak = sheet.number(_PEAK) if sheet else best
    hbm = sheet.number("hbm_bytes_per_s") if sheet else links.hbm_copy_bytes_per_s
    sustained = min(1.5, kept_up.flop_per_s / peak)
    ceilings = Ceilings(peak * sustained, hbm, links.hbm_copy_bytes_per_s, links.launch_ns)
    fit = fit_curves(samples, ceilings, where)
    rates = {
        "launch_latency_ns": links.launch_ns,
        "event_wait_latency_ns": links.event_wait_ns,
    }
    curves = {key: _whole(where) for key in ("h2d", "d2h", "duplex", "host_dram")}
    curves["hbm"] = _whole(where, min(1.5, links.hbm_copy_bytes_per_s / hbm))
    curves["sustained"] = Efficiency(
        max=sustained, half=0, of="flops", kind="measured",
        source=f"matrix products kept up for {request.warm_seconds / 2:g} s, "
        f"{kept_up.flop_per_s / 1e12:.0f} TFLOP/s; {where}",
    )  # fmt: skip
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "device"
    document: dict[str, object] = {
        "name": f"{name} probed",
        "description": f"{name}, {where}",
        "device": "cuda",
        "compute_capability": _compute_capability(where),
        _PEAK: getattr(sheet, _PEAK) if sheet else _measured(best, where),
        "peak_fp32_flop_per_s": sheet.peak_fp32_flop_per_s if sheet else _UNMEASURED_FP32,
        "hbm_bytes_per_s": sheet.hbm_bytes_per_s if sheet else _measured(hbm, where),
        "host_dram_bytes_per_s": Number(
            kind="unconstrained",
            source="copies are bounded by the duplex rate measured through the same DRAM",
        ),
        **{field: _measured(value, where) for field, value in rates.items()},
        **link_numbers(links.copies.lines, where),
        **_both_numbers(links.copies, where),
        "efficiency": curves | with_general(fit.curves),
    }
    return Machine.model_validate(document), fit


def _host_rate(where: str) -> Number:
    """FLOP/s of AdamW's update on all cores, which stands for what they compute and move."""
    sample = host_update_sample("bfloat16")
    rate = sample.works[0].flops / sample.time_ns * 1e9
    return _measured(rate, f"AdamW's update on {torch.get_num_threads()} threads; {where}")


def link_numbers(lines: tuple[Line, Line], where: str) -> dict[str, Number]:
    """Return a profile's numbers of the link: H2D and D2H in bytes/s, a copy's cost in ns."""
    found = {
        H2D: 1e9 / lines[0].ns_per_unit,
        D2H: 1e9 / lines[1].ns_per_unit,
        "copy_latency_ns": max(line.fixed_ns for line in lines),
    }
    residual = max(line.residual for line in lines)
    source = f"{where}; copies of 1 MiB and more, {residual:.1%} off a line"
    return {field: _measured(value, source) for field, value in found.items()}


def _both_numbers(copies: Copies, where: str) -> dict[str, Number]:
    """What it says of both directions at once: their rate together, and H2D's share."""
    found = {DUPLEX: copies.duplex_bytes_per_s, DUPLEX_SHARE: copies.h2d_share}
    each = " and ".join(f"{rate / 1e9:.1f}" for rate in copies.both_bytes_per_s)
    source = f"{where}; H2D and D2H at once {each} GB/s"
    return {field: _measured(value, source) for field, value in found.items()}


def _compute_capability(where: str) -> ComputeCapability | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return ComputeCapability(value=f"{major}.{minor}", kind="measured", source=where)


def with_general(curves: dict[str, Efficiency]) -> dict[str, Efficiency]:
    """The curves, and for units that were not measured: `vector` is the slowest of memory's own."""
    general = {_unrefined(key): curve for key, curve in curves.items() if "64" not in key}
    of_memory = [curve for curve in curves.values() if curve.of == "bytes"]
    if of_memory:
        general["vector"] = min(of_memory, key=lambda curve: curve.max)
    return general | curves


def _unrefined(key: str) -> str:
    unit, implementation = key.split("/")[0], implementation_in(key)
    return unit if implementation is None else f"{unit}/{implementation}"


def _whole(source: str, maximum: float = 1.0) -> Efficiency:
    return Efficiency(max=maximum, half=0.0, of="bytes", kind="measured", source=source)


def _measured(value: float, source: str) -> Number:
    return Number(value=value, kind="measured", source=source)


def _used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def memory_bytes(
    device_bytes: int, host_bytes: int | None, *, is_unified: bool
) -> dict[str, float]:
    """Capacities of a profile; of a GPU that uses the host's memory, shares of what is free."""
    if not is_unified:
        host = {} if host_bytes is None else {"host_memory_bytes": float(host_bytes)}
        return {"device_memory_bytes": float(device_bytes), **host}
    pool = device_bytes if host_bytes is None else min(device_bytes, host_bytes)
    device = pool - min(FEED_BYTES, pool // 2)
    return {
        "device_memory_bytes": float(device),
        "host_memory_bytes": float(pool - device),
        "unified_memory_bytes": float(pool),
    }
