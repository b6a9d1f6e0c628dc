"""What the campaign knows of its device: the kernels that are right on it, and its profile."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.gpu.device import requests
from benchmarks.gpu.device.worker import Worker
from benchmarks.gpu.jobs.campaign import KERNELS, PROBE, Cell
from benchmarks.gpu.jobs.results import KernelsFound, LinkRate, ProbeFound
from benchmarks.gpu.jobs.store import Store
from benchmarks.gpu.run import expected
from benchmarks.gpu.run.budget import Budget
from benchmarks.gpu.run.settings import AUTO, Settings
from twinstream.executor.probe.process import DeviceProcess, JobFailed, JobRefused, JobTimeout
from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.schema import AttentionChoice, Machine
from twinstream.models.recipes.recipe import KernelChoice


@dataclass(frozen=True)
class KnownDevice:
    """Finds kernels and profile out, and has them from earlier calls."""

    settings: Settings
    store: Store
    worker: Worker
    budget: Budget
    tell: Callable[[str], None]

    def choose(self, limit_s: float) -> KernelsFound:
        """The kernels asked for; of those left open (`auto`) the best, and why not the others.

        Raises:
            JobRefused: what was asked for cannot run here.
            JobFailed: no attention is right here, no kernels are, or time ran out.
        """
        settings = self.settings
        if settings.backend == "cpu" and settings.vector == settings.attention == AUTO:
            return KernelsFound(kernels=KernelChoice(), others=("sdpa_cpu",))
        from twinstream.executor.probe.choosing import Tries, choose_kernels
        from twinstream.executor.probe.device import begin_device

        end_s = self.budget.clock() + limit_s
        unnamed = "eager" if settings.backend == "cpu" else None
        with DeviceProcess(partial(begin_device, settings.backend)) as process:
            try:
                chosen = choose_kernels(
                    Tries(process, lambda: end_s - self.budget.clock()),
                    settings.presets,
                    unnamed if settings.attention == AUTO else settings.attention,
                    _vectors(settings),
                )
            except JobTimeout:
                raise
            except JobFailed as error:
                if AUTO in (settings.vector, settings.attention):
                    raise
                raise JobRefused(str(error)) from None
        for note in chosen.notes:
            self.tell(note)
        return KernelsFound(**dict(chosen))

    def probe(self, limit_s: float) -> ProbeFound:
        kernels = self.kernels()
        chosen = self.chosen() or KernelsFound(kernels=kernels)
        commit = self.store.results.where.commit
        from twinstream.executor.probe.tasks.sample_log import count_samples

        samples = self.store.samples
        if samples.exists():
            self.tell(
                f"{count_samples(samples)} samples of a probe that was cut are not measured again"
            )
        request = requests.ProbeDevice(chosen, self.settings.presets, commit, samples)
        probed = self.worker.ask(request, requests.ProbedDevice, limit_s)
        samples.unlink(missing_ok=True)
        machine = probed.machine
        if self.chosen() is None or self.settings.attention != AUTO:
            choice = AttentionChoice(
                name=kernels.attention, kind="assumed", source="not compared with others"
            )
            machine = machine.model_copy(update={"attention": choice})
        save_machine(machine, self.store.profile)
        return ProbeFound(
            machine=machine.name,
            content_hash=machine.content_hash,
            kernels=kernels,
            links=tuple(
                LinkRate(direction=direction, size_bytes=size, gb_per_s=rate)
                for direction, size, rate in probed.links
            ),
            samples=probed.samples,
            sustained_flop_per_s=probed.sustained_flop_per_s,
            sustained=probed.sustained,
        )

    def probe_expected_s(self) -> float:
        """By the samples that are taken, and the load before each."""
        if self.settings.is_tiny:
            return expected.probe_s(0, 0.0, is_tiny=True)
        from twinstream.executor.probe.device import LOAD_S, num_samples

        chosen = self.chosen() or KernelsFound(kernels=self.kernels())
        return expected.probe_s(num_samples(chosen, self.settings.presets), LOAD_S, is_tiny=False)

    def probed(self) -> Machine | None:
        """The profile of an earlier call, if it is whole."""
        found = self.store.results.found(PROBE)
        if not isinstance(found, ProbeFound):
            return None
        with suppress(ProfileError):
            machine = load_machine(self.store.profile)
            if machine.content_hash == found.content_hash:
                return machine
        self.tell(f"{self.store.profile} is not the profile that was probed: probing again")
        self.store.forget(PROBE)
        return None

    def machine(self) -> Machine | None:
        """The probed profile; without one the shipped profile of the device, and says so."""
        if (machine := self.probed()) is not None:
            return machine
        from twinstream.executor.probe.device import datasheet_of

        shipped = datasheet_of(self.store.results.where.device)
        if shipped is not None:
            self.tell(f"no probed profile: planning with the shipped '{shipped.name}'")
        return shipped

    def kernels(self) -> KernelChoice:
        """Those chosen; where none were, what needs no compiling and every torch has."""
        if (found := self.chosen()) is not None:
            return found.kernels
        on_cuda = self.settings.backend == "cuda"
        return KernelChoice(attention="sdpa_flash" if on_cuda else "eager")

    def kernels_of(self, cell: Cell) -> KernelChoice | str:
        """A cell's kernels; why it cannot have them where it wants another attention."""
        kernels, chosen = self.kernels(), self.chosen()
        if cell.attention is None:
            return kernels
        if cell.attention == kernels.attention:
            return "the other cells have this attention too"
        if chosen is None or cell.attention not in chosen.others:
            return f"attention {cell.attention} is not known to be right here (see {KERNELS})"
        return kernels.model_copy(update={"attention": cell.attention, "deterministic": False})

    def chosen(self) -> KernelsFound | None:
        found = self.store.results.found(KERNELS)
        return found if isinstance(found, KernelsFound) else None

    def has_kernels(self) -> bool:
        """Whether some were chosen, or no choice was tried."""
        return self.chosen() is not None or KERNELS not in self.store.results.outcomes


def _vectors(settings: Settings) -> tuple[Literal["triton", "eager"], ...]:
    if settings.vector != "auto":
        return (settings.vector,)
    return ("triton", "eager") if settings.backend == "cuda" else ("eager",)
