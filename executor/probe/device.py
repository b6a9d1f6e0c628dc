"""A CUDA device measured: which kernels are right and fastest on it, then the profile they give."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from twinstream.executor.memory.device_memory import expand_segments
from twinstream.executor.probe.chains import PRESETS, expert_chains, probe_chains, whole_chains
from twinstream.executor.probe.choosing import Tries, choose_kernels
from twinstream.executor.probe.chosen import Chosen
from twinstream.executor.probe.cuda import Probed, ProbeRequest, probe_cuda
from twinstream.executor.probe.process import DeviceProcess, JobFailed, JobRefused
from twinstream.executor.probe.tasks.task_samples import listed_grouped, listed_samples
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import AttentionChoice, Machine
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.models.recipe import KernelChoice
from twinstream.schedule.chain import Chain
from twinstream.schedule.errors import TwinstreamError

# Whose datasheet a device's nominal rates are of, by a part of its name.
_DATASHEETS = {"H200": "h200_datasheet", "H100": "h100_datasheet", "A100": "a100", "B200": "b200"}
_PROBE_LIMIT_S = 600.0
_PRESETS = PRESETS[:2]  # those of 32b would be half a minute more, for the same curves
LOAD_S = 0.2  # some three times the 70 ms over which a power limit is kept


class ProbeError(TwinstreamError):
    """The error of a device that could not be measured."""


def probed_machine(tell: Callable[[str], None], presets: tuple[str, ...] = _PRESETS) -> Machine:
    """The profile of the CUDA device, which also names the attention that is right and fastest.

    Everything is done in a process of its own, anew after a kernel that broke it.

    Args:
        tell: takes a line on how far it is.
        presets: whose shapes are measured.

    Raises:
        ProbeError: no kernels are right, or measuring broke; it says why.
    """
    with DeviceProcess(partial(begin_device, "cuda")) as process:
        try:
            tell("trying which kernels are right and fastest here: some minutes if they compile")
            chosen = choose_kernels(Tries(process), presets)
            for note in chosen.notes:
                tell(note)
            kernels = chosen.kernels
            tell(
                "measuring links, memory and kernels under load, with attention "
                f"{kernels.attention} and {kernels.vector} vector kernels: a minute"
            )
            process.close()  # what was tried beside is not to count as the device's reserve
            job = partial(probe_device, chosen=chosen, presets=presets)
            return process.do(job, _PROBE_LIMIT_S).machine
        except (JobRefused, JobFailed) as error:
            if details := getattr(error, "details", ""):
                tell(details)
            raise ProbeError(f"the CUDA device could not be measured: {error}") from None


def begin_device(device: DeviceName) -> DeviceName:
    """Set torch up as a run does, which only the first in a process can."""
    if device == "cpu":
        torch.set_num_threads(1)
    elif torch.cuda.is_available():  # where there is none, the first job says so
        expand_segments()
    return device


def probe_device(
    device: DeviceName,
    chosen: Chosen,
    presets: tuple[str, ...],
    commit: str = "",
    samples: Path | None = None,
) -> Probed:
    """The profile of the CUDA device with these kernels; on tiny presets it only tries it.

    Samples are in the file as they come, and are taken from there where a probe was cut.
    """
    where = torch.device(device, torch.cuda.current_device())
    name, date = torch.cuda.get_device_name(where), datetime.now(UTC).date().isoformat()
    small = presets == ("tiny",)
    request = ProbeRequest(
        chains=whole_chains(chosen.kernels, presets),
        datasheet=datasheet_of(name),
        commit=commit,
        date=date,
        warm_seconds=0.5 if small else 4.0,
        load_seconds=0.05 if small else LOAD_S,
        attention_chains=_other_chains(chosen, presets),
        expert_chains=() if small else expert_chains(chosen.kernels),
        excess_bytes=chosen.excess_bytes,
        samples=samples,
    )
    probed = probe_cuda(request, where)
    choice = AttentionChoice(
        name=chosen.kernels.attention,
        kind="measured",
        source=f"right and fastest on {name}, {date}, torch {torch.__version__}",
    )
    return replace(probed, machine=probed.machine.model_copy(update={"attention": choice}))


def num_samples(chosen: Chosen, presets: tuple[str, ...]) -> int:
    """Return the number of samples that a probe of these presets takes; equal work counts once."""
    kernels = chosen.kernels
    own = {(kernels.attention, works) for chain in whole_chains(kernels, presets)
           for _, works in listed_samples(chain)}  # fmt: skip
    for chain in _other_chains(chosen, presets):
        name = KernelChoice.model_validate(chain.recipe["kernels"]).attention
        alone = (works for text, works in listed_samples(chain) if text.startswith("attention"))
        own |= {(name, works) for works in alone}
    experts = {works for chain in expert_chains(kernels) for _, works in listed_grouped(chain)}
    return len(own) + len(experts)


def _other_chains(chosen: Chosen, presets: tuple[str, ...]) -> tuple[Chain, ...]:
    """Those of which only attention is measured: of all shapes and presets, so that heads of 64 and
    of 128 are, and attention that is not deterministic."""
    chains: list[Chain] = []
    if presets != ("tiny",):
        chains += probe_chains(chosen.kernels, PRESETS)
    for other in chosen.others:
        kernels = chosen.kernels.model_copy(update={"attention": other, "deterministic": False})
        chains += probe_chains(kernels, presets)
    return tuple(chains)


def datasheet_of(device_name: str) -> Machine | None:
    """The shipped profile whose nominal rates a device has, if any."""
    for part, profile in _DATASHEETS.items():
        if part in device_name:
            return load_machine(profile)
    return None
