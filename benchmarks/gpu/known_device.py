"""What the campaign knows of its device: the kernels that are right on it, and its profile."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu import requests
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.choosing import Tries, choose_kernels
from benchmarks.gpu.device_side import datasheet_of
from benchmarks.gpu.jobs import KERNELS, PROBE, Cell
from benchmarks.gpu.results import KernelsFound, LinkRate, ProbeFound
from benchmarks.gpu.store import Store
from benchmarks.gpu.worker import Backend, Worker
from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.schema import AttentionChoice, Machine
from twinstream.models.recipe import KernelChoice


@dataclass(frozen=True)
class Wanted:
    """The kernels asked for, or `auto`, and the presets on whose shapes the device is measured."""

    backend: Backend
    vector: str
    attention: str
    presets: tuple[str, ...]


@dataclass(frozen=True)
class KnownDevice:
    """Finds kernels and profile out, and has them from earlier calls."""

    wanted: Wanted
    store: Store
    worker: Worker
    budget: Budget
    tell: Callable[[str], None]

    def choose(self, limit_s: float) -> KernelsFound:
        wanted, end_s = self.wanted, self.budget.clock() + limit_s
        tries = Tries(self.worker, lambda: end_s - self.budget.clock())
        found = choose_kernels(
            tries, wanted.backend, wanted.vector, wanted.attention, wanted.presets
        )
        for note in found.notes:
            self.tell(note)
        return found

    def probe(self, limit_s: float) -> ProbeFound:
        where, kernels, chosen = self.store.results.where, self.kernels(), self.chosen()
        request = requests.ProbeDevice(
            kernels,
            self.wanted.presets,
            where.commit,
            where.date,
            chosen.excess_bytes if chosen else 0,
            chosen.others if chosen else (),
        )
        probed = self.worker.ask(request, requests.ProbedDevice, limit_s)
        machine = self._with_attention(probed.machine, kernels)
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

    def probed(self) -> Machine | None:
        """The profile of an earlier call, if it is whole."""
        outcome = self.store.results.outcomes.get(PROBE)
        if outcome is None or not isinstance(outcome.found, ProbeFound):
            return None
        with suppress(ProfileError):
            machine = load_machine(self.store.profile)
            if machine.content_hash == outcome.found.content_hash:
                return machine
        self.tell(f"{self.store.profile} is not the profile that was probed: probing again")
        self.store.forget(PROBE)
        return None

    def machine(self) -> Machine | None:
        """The probed profile; without one the shipped profile of the device, and says so."""
        if (machine := self.probed()) is not None:
            return machine
        shipped = datasheet_of(self.store.results.where.device)
        if shipped is not None:
            self.tell(f"no probed profile: planning with the shipped '{shipped.name}'")
        return shipped

    def kernels(self) -> KernelChoice:
        """Those chosen; where none were, what needs no compiling and every torch has."""
        if (found := self.chosen()) is not None:
            return found.kernels
        on_cuda = self.wanted.backend == "cuda"
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
        outcome = self.store.results.outcomes.get(KERNELS)
        found = outcome.found if outcome is not None else None
        return found if isinstance(found, KernelsFound) else None

    def has_kernels(self) -> bool:
        """Whether some were chosen, or no choice was tried."""
        return self.chosen() is not None or KERNELS not in self.store.results.outcomes

    def _with_attention(self, machine: Machine, kernels: KernelChoice) -> Machine:
        """Naming the attention that was chosen, for plans that leave it open."""
        where = self.store.results.where
        kind: Literal["measured", "assumed"] = "measured"
        source = f"right and fastest on {where.device}, {where.date}, torch {where.torch}"
        if self.chosen() is None or self.wanted.attention != "auto":
            kind, source = "assumed", "not compared with others"
        choice = AttentionChoice(name=kernels.attention, kind=kind, source=source)
        return machine.model_copy(update={"attention": choice})
