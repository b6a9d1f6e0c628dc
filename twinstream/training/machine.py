"""The machine that a run is planned for: the one here, with what memory is free."""

import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.loader import (
    load_machine,
    load_machine_text,
    machine_names,
    save_machine,
)
from twinstream.hardware_profiles.profile_files import cache_folder, profile_toml
from twinstream.hardware_profiles.schema import DEVICE_SHARE, FEED_BYTES, Machine
from twinstream.log.run_files import MACHINE
from twinstream.models.kernel_costs.attention_limits import attention_limits, attention_names
from twinstream.planner.request import HOST_SHARE, with_drive, with_endurance
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_text, write_text
from twinstream.training.options import OptionsError, TrainOptions

if TYPE_CHECKING:
    from twinstream.executor.ranks.gpus import LocalGpus

Tell = Callable[[str], None]
"""Takes a line about what is going on."""
_DIGEST = "# SHA-256 of the lines above: "
_MUCH_FASTER = 1.4  # a CPU than when it was measured


@dataclass(frozen=True)
class LocalMachine:
    """A machine, how kernels run on it, and the caps in bytes; None is what `plan` takes of it.

    `nvlink`: whether NVLink links each of several GPUs with each; None where nothing tells.
    """

    machine: Machine
    backend: str
    device_mem: str | int | None
    host_mem: str | int | None
    nvlink: bool | None = None
    disk_mem: str | int | None = None

    @property
    def is_here(self) -> bool:
        """False where the profile is of another kind of device than this machine trains on."""
        return self.machine.device == self.backend

    def require_own_profile(self) -> None:
        """
        Raises:
            OptionsError: the machine is a profile of another kind of device than trains here.
        """
        if not self.is_here:
            raise OptionsError(
                f"machine: '{self.machine.name}' is the profile of a {self.machine.device} device, "
                f"and this run is on {self.backend}: leave it out, or give what `twinstream probe` "
                "wrote here"
            )


def detect_machine(
    options: TrainOptions, folder: Path | None, backend: str, dtype: str, tell: Tell,
    head_dim: int | None = None,
) -> LocalMachine:  # fmt: skip
    """The profile named, else that of an earlier start of the run, a shipped one, or a new one.

    A CUDA device whose name says which shipped profile is its own has that, and only its attention
    is timed, in seconds; else it is measured, which takes some minutes, and a CPU some seconds.
    What was found is kept in the user's cache, for the next run. Then such a GPU is checked, which
    takes some 3 s at every run's beginning: its links are its host's.

    Args:
        folder: of the run, which may have the profile that was measured when it began; if any.
        tell: takes a line on what is being measured.
        head_dim: of the model, whose attention is checked; None leaves attention out.

    Raises:
        TwinstreamError: the profile cannot be read, or nothing can be measured.
        GpusError: the GPUs of several ranks are not alike.
    """
    gpus = _gpus_of_ranks(options) if backend == "cuda" else None
    machine = _machine(options, folder, backend, dtype, tell, head_dim)
    machine, disk_mem = with_disk(options, machine, tell)
    if machine.device != backend:
        tell(f"planning for {machine.name}, which is not this machine: caps are of its own memory")
        return LocalMachine(
            machine, backend, options.device_mem, options.host_mem, disk_mem=disk_mem
        )
    device_mem, host_mem = _free(options, machine, backend, gpus)
    nvlink = None if gpus is None else gpus.nvlink
    return LocalMachine(machine, backend, device_mem, host_mem, nvlink, disk_mem)


def with_disk(
    options: TrainOptions, machine: Machine, tell: Tell
) -> tuple[Machine, str | int | None]:
    """The machine with the drive that the options name, and its cap; None without one.

    Its rate is given, the profile's, or measured on the folder now, which takes some seconds.

    Raises:
        OptionsError: the folder is none, or a cap or a rate is of no folder.
        WeightsError: it cannot be read or written.
    """
    if options.disk is None:
        flags = ("disk_mem", "disk_bandwidth", "disk_tbw")
        for flag in (name for name in flags if getattr(options, name) is not None):
            raise OptionsError(f"{flag} needs disk, a folder on the drive: --disk PATH")
        return machine, None
    if not options.disk.is_dir():
        raise OptionsError(f"disk: {options.disk} is no folder: name one on the drive")
    if options.hosts > 1:
        raise OptionsError(
            "disk: ranks of several machines have none yet: leave it out, or train on one machine"
        )
    if options.disk_bandwidth is not None:
        machine = with_drive(machine, options.disk_bandwidth)
    elif machine.disk_read_bytes_per_s is None:
        from twinstream.executor.probe.drive import probed_drive

        tell(f"measuring the drive of {options.disk}: some seconds")
        machine = probed_drive(options.disk).on(machine)
    usual = shutil.disk_usage(options.disk).total
    return with_endurance(machine, options.disk_tbw), options.disk_mem or usual


def keep_machine(here: LocalMachine, folder: Path) -> None:
    """Write the profile into the folder of the run.

    Raises:
        DocumentError: it cannot be written.
    """
    save_machine(here.machine, folder / MACHINE)


def shipped_for(device_name: str) -> str | None:
    """The shipped profile whose name is in a device's; the longest, if several are.

    >>> shipped_for("NVIDIA H100 80GB HBM3"), shipped_for("NVIDIA GH200 480GB")
    ('h100', 'gh200')
    """
    plain = device_name.lower().replace(" ", "")
    found = [name for name in machine_names() if name in plain]
    return max(found, key=len) if found else None


def _machine(
    options: TrainOptions, folder: Path | None, backend: str, dtype: str, tell: Tell,
    head_dim: int | None = None,
) -> Machine:  # fmt: skip
    if options.machine is not None:
        return load_machine(options.machine)
    if folder is not None and (folder / MACHINE).exists():
        return load_machine(folder / MACHINE)
    if backend == "cpu":
        return _of_this_cpu(dtype, tell)
    import torch

    name = shipped_for(torch.cuda.get_device_name())
    if name is None:
        from twinstream.executor.probe.device import probed_machine

        return _found_once("", lambda: probed_machine(tell), tell)
    shipped = load_machine(name)
    if dtype != "bfloat16":
        return shipped
    from twinstream.executor.probe.known_check import checked_machine
    from twinstream.executor.probe.known_gpu import with_attention

    found = _found_once(shipped.content_hash, lambda: with_attention(shipped, tell), tell)
    return checked_machine(found, head_dim, tell)


def _of_this_cpu(dtype: str, tell: Tell) -> Machine:
    """What an earlier run measured of this CPU, with this torch and as many threads; anew where it
    is much faster now, since it was busy then."""
    import torch

    from twinstream.api import probe
    from twinstream.executor.probe.cpu import cpu_pace

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = cpu_name()
    facts = (name, str(cores), str(torch.get_num_threads()), torch.__version__, dtype)

    def found() -> Machine:
        tell("measuring this CPU, once: some seconds (twinstream probe measures it anew)")
        return probe([dtype])

    return _kept(name, facts, found, tell, lambda machine: cpu_pace(machine) < _MUCH_FASTER)


def _found_once(about: str, find: Callable[[], Machine], tell: Tell) -> Machine:
    """What was found of this GPU by an earlier run with these libraries, else what is found now.

    Args:
        about: what else it depends on.
    """
    import torch

    installed = []
    for name in attention_names():
        library = attention_limits(name).library
        if library is not None and library.missing() is None:
            installed.append(f"{library.distribution} {version(library.distribution)}")
    device = torch.cuda.get_device_name()
    facts = (device, torch.__version__, str(torch.version.cuda), *installed, about)
    return _kept(device, facts, find, tell)


def _kept(
    device: str, facts: Sequence[str], find: Callable[[], Machine], tell: Tell,
    holds: Callable[[Machine], bool] = lambda machine: True,
) -> Machine:  # fmt: skip
    """The profile that was found with these facts, if it still holds, else what is found now."""
    key = sha256("\n".join(facts).encode()).hexdigest()[:12]
    path = cache_folder() / f"{re.sub(r'[^a-z0-9]+', '-', device.lower())}-{key}.toml"
    if path.exists():
        kept = _read_kept(path)
        if kept is None:
            tell(f"{path} is damaged, or of another version of twinstream: measuring anew")
        elif holds(kept):
            return kept
    machine = find()
    attention = machine.attention
    if machine.device == "cuda" and (attention is None or attention.kind == "assumed"):
        return machine  # none was right: the next run tries again
    with suppress(OSError, TwinstreamError):  # a cache that cannot be written costs some seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        text = profile_toml(machine)
        write_text(f"{text}{_DIGEST}{_digest(text)}\n", path)
    return machine


def _read_kept(path: Path) -> Machine | None:
    """The profile in a file of the cache; None where it has not the digest that it says."""
    with suppress(OSError, ValueError, ProfileError):
        text, _, digest = read_text(path).rpartition(_DIGEST)
        if digest.strip() == _digest(text):
            return load_machine_text(text, str(path))
    return None


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def cpu_name() -> str:
    """Its model's, as Linux tells it, else what kind it is."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _free(
    options: TrainOptions, machine: Machine, backend: str, gpus: "LocalGpus | None"
) -> tuple[str | int | None, str | int | None]:
    """Caps: those given, else what is free now, and no more than the profile has.

    Args:
        gpus: of several ranks.
    """
    from twinstream.executor.memory.host_limits import host_limits

    free = host_limits().free_bytes
    beside = _beside_caps(options.ranks_on_host) if backend == "cpu" else 0
    free_host = None if free is None else int(HOST_SHARE * max(0, free - beside))
    if backend == "cuda" and machine.pool_bytes is None:
        free_device: int | None = _free_on_gpu() if gpus is None else gpus.free_bytes
    else:  # both are the host's
        free_device = None
        if free_host is not None:
            feed = min(FEED_BYTES, free_host // 2)
            free_device = int(DEVICE_SHARE * free_host) if backend == "cpu" else free_host - feed
            free_host -= free_device
    capacity = "device_memory_bytes" if machine.pool_bytes is None else "unified_memory_bytes"
    return (
        _least(options.device_mem, free_device, machine, capacity),
        _least(options.host_mem, free_host, machine, "host_memory_bytes"),
    )


def _beside_caps(num_ranks: int) -> int:
    """What a run on a CPU will take of free memory beside its arenas; ranks are processes of their
    own, which have nothing of what else this one holds."""
    from twinstream.executor.memory.host_limits import (
        INTERPRETER_BYTES,
        WORKING_BYTES,
        process_bytes,
    )

    now = process_bytes()[0] or 0
    of_interpreter = min(now, INTERPRETER_BYTES) if num_ranks > 1 else 0
    return num_ranks * (WORKING_BYTES + of_interpreter)


def _gpus_of_ranks(options: TrainOptions) -> "LocalGpus | None":
    """None for one rank."""
    from twinstream.executor.ranks.gpus import detect_gpus

    return detect_gpus(options.ranks_on_host) if (options.ranks or 1) > 1 else None


def _free_on_gpu() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


def _least(
    given: str | None, free_bytes: int | None, machine: Machine, field: str
) -> str | int | None:
    if given is not None or free_bytes is None:
        return given
    number = getattr(machine, field)
    has = None if number is None else number.value
    return free_bytes if has is None else min(free_bytes, int(has))
