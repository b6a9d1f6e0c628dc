"""Measure what a shipped profile of a GPU lacks: the best attention there, and its rate.

That depends on what is installed, and is tried and timed in seconds, unlike a whole profile.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import torch

from twinstream.executor.probe.chains import probe_chains
from twinstream.executor.probe.choosing import TRY_LIMIT_S, attention_try
from twinstream.executor.probe.cuda import matmul_load, with_general
from twinstream.executor.probe.device import begin_device
from twinstream.executor.probe.process import DeviceProcess, JobFailed, JobRefused
from twinstream.executor.probe.tasks.attention import AttentionCandidate
from twinstream.executor.probe.tasks.curves import Ceilings, fit_curves
from twinstream.executor.probe.tasks.task_samples import TaskSample, attention_samples
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.hardware_profiles.schema import AttentionChoice, Machine, Number
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.models.kernel_costs.attention_limits import (
    attention_limits,
    attention_names,
    attention_refusal,
)
from twinstream.models.recipe import KernelChoice

_PRESETS = ("8b", "1b")  # heads of 128 and of 64
_LOAD_S = 0.2  # before each timing, so that a power limit binds
_EVERY_HEAD_DIM = 64
_RESERVE = "device_reserve_bytes"


def with_attention(machine: Machine, tell: Callable[[str], None]) -> Machine:
    """The profile, naming the fastest attention that is right on this GPU, with rates of all such.

    Deterministic ones alone. Where none is right the profile stays as it is.

    Args:
        machine: a shipped profile of the GPU that is here.
        tell: takes a line on how far it is, and on what is left out.
    """
    names = candidates(machine)
    tell(f"timing attention here, once for this GPU, driver and libraries: {', '.join(names)}")
    right: list[AttentionCandidate] = []
    samples: list[TaskSample] = []
    with DeviceProcess(partial(begin_device, "cuda")) as process:
        for name in names:
            job = partial(measured_attention, name=name, presets=_PRESETS, load_s=_LOAD_S)
            try:
                tried, found = process.do(job, TRY_LIMIT_S)
            except (JobRefused, JobFailed) as error:
                tried, found = AttentionCandidate(name, str(error)), []
            if tried.refused is None:
                right.append(tried)
                samples += found
            else:
                tell(f"attention {name} is left out: {tried.refused}")
    return _with_rates(machine, right, samples) if right else machine


def candidates(machine: Machine) -> tuple[str, ...]:
    """Deterministic attentions that are made for the GPU and installed."""
    capability = machine.compute_capability.major if machine.compute_capability else None
    found = []
    for name in attention_names():
        limits = attention_limits(name)
        if (
            name == "eager"
            or not limits.deterministic
            or (limits.library and limits.library.missing())
        ):
            continue
        if attention_refusal(name, "cuda", "bfloat16", _EVERY_HEAD_DIM, capability) is None:
            found.append(name)
    return tuple(found)


def measured_attention(
    device: DeviceName, name: str, presets: tuple[str, ...], load_s: float
) -> tuple[AttentionCandidate, list[TaskSample]]:
    """Try one attention on the shapes of these presets, and time it if it is right."""
    tried = attention_try(device, name, presets)
    if tried.refused is not None:
        return tried, []
    where = torch.device(device)
    load, _ = matmul_load(where)
    timer = DeviceTimer(where, load=load, load_s=load_s)
    chains = probe_chains(KernelChoice(attention=name), presets)
    return tried, [sample for chain in chains for sample in attention_samples(chain, timer)]


def _with_rates(
    machine: Machine, right: list[AttentionCandidate], samples: list[TaskSample]
) -> Machine:
    best = min(right, key=lambda tried: tried.time_ns)
    date = datetime.now(UTC).date().isoformat()
    where = f"timed {date} on {_device_name()}, torch {torch.__version__}"
    hbm = machine.rate("hbm_bytes_per_s")
    ceilings = Ceilings(
        machine.rate("peak_bf16_flop_per_s"), hbm, hbm, machine.number("launch_latency_ns")
    )
    fit = fit_curves(samples, ceilings, where)
    update: dict[str, object] = {
        "attention": AttentionChoice(
            name=best.name, kind="measured", source=f"right and fastest: {where}"
        ),
        "efficiency": machine.efficiency | with_general(fit.curves),
    }
    excess = max(tried.excess_bytes for tried in right)
    reserve = getattr(machine, _RESERVE)
    if excess and reserve is not None:
        update[_RESERVE] = Number(
            value=reserve.value + excess, kind="measured",
            source=f"{reserve.source}; and what attention takes beyond its formula, {where}",
        )  # fmt: skip
    return machine.model_copy(update=update)


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "this device"
