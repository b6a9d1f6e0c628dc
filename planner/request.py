"""A request for a plan: the model, the step, the machine, its caps, and what the user has fixed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.overrides import changed
from twinstream.hardware_profiles.schema import FEED_BYTES, Machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.providers.model import (
    AnyModel,
    load_any_model,
    require_decoder,
    require_executable,
)
from twinstream.models.recipes.recipe import OptimizerPlace, Recipe
from twinstream.planner.choices import OPEN, ChoiceError, Choices, Effort
from twinstream.planner.kernel_choice import require_allowed, usual_kernels
from twinstream.schedule.document import Caps
from twinstream.schedule.errors import TwinstreamError, require, require_whole
from twinstream.schedule.sizes import SizeError, gib, parse_bytes, whole_bytes_of
from twinstream.schedule.workload import Cache, Packing, Result

DEFAULT_POLICY = "optimal"
_MOST_TOKENS = 2**31
_NOMINAL = 1.01  # "24GiB" of a card that has 23.99
HOST_SHARE = (
    0.8  # of host memory that a run takes unasked: the rest is for files and other programs
)


class ChunkingError(TwinstreamError):
    """No chunking of the step satisfies what the user fixed."""


@dataclass(frozen=True)
class TrainingStep:
    """What the user fixed of a step; None is left to the planner, which never changes the recipe.

    `optimizer_overhead` is the share of the step that the optimizer may take where tokens per step
    are left open. With `packing`, sequences of any lengths up to `seq_len` are packed; a chunk has
    room for a whole number of what is expected of it. A recipe whose loss is of pairs has them
    packed: two sequences of `seq_len`, unless others are expected.
    """

    seq_len: int
    tokens_per_step: int | None = None
    chunk_tokens: int | None = None
    chunks_per_round: int | None = None
    recipe: Recipe = field(default_factory=Recipe)
    optimizer_overhead: float = 0.01
    packing: Packing | None = None
    forward_only: bool = False
    cache: Cache | None = None
    result: Result = "loss"

    def __post_init__(self) -> None:
        require_whole("seq_len", self.seq_len, 1, _MOST_TOKENS)
        for name, most in (
            ("tokens_per_step", 2**60),
            ("chunk_tokens", _MOST_TOKENS),
            ("chunks_per_round", _MOST_TOKENS),
        ):
            if (value := getattr(self, name)) is not None:
                require_whole(name, value, 1, most)
        require("recipe", self.recipe, Recipe)
        require("optimizer_overhead", self.optimizer_overhead, float, int)
        if self.packing is None:
            object.__setattr__(self, "packing", self.recipe.loss.packing(self.seq_len))
        if self.packing is not None:
            require("packing", self.packing, Packing)
            require_whole("the sum of expected_lengths", self.packing.tokens, 1, _MOST_TOKENS)

    @property
    def pack_tokens(self) -> int:
        """Tokens that only whole numbers of are packed: a sequence, or all that are expected."""
        return self.seq_len if self.packing is None else self.packing.tokens

    def packing_of(self, chunk_tokens: int) -> Packing | None:
        """Return the packing of a chunk; None where all sequences have one length."""
        if self.packing is None:
            return None
        return self.packing.times(chunk_tokens // self.packing.tokens)


@dataclass(frozen=True)
class PlanRequest:
    """A request for one plan; the same from Python, the command line, sweeps and the explorer.

    Where the recipe of `step` leaves kernels open, they are those that suit the machine.
    """

    spec: AnyModel
    step: TrainingStep
    machine: Machine
    caps: Caps
    policy: str = DEFAULT_POLICY
    choices: Choices = OPEN

    @staticmethod
    def of(  # noqa: PLR0913
        model: str | Path | AnyModel,
        machine: str | Path | Machine,
        *,
        step: TrainingStep,
        device_mem: str | int | None = None,
        host_mem: str | int | None = None,
        disk_mem: str | int | None = None,
        policy: str = DEFAULT_POLICY,
        choices: Choices = OPEN,
    ) -> PlanRequest:
        """Make a request of a user's words; the arguments are those of `twinstream.plan`.

        Raises:
            TwinstreamError: a name, a number or a file is wrong.
        """
        require("step", step, TrainingStep)
        spec, profile = load_any_model(model, longest=step.seq_len), load_machine(machine)
        require("choices", choices, Choices)
        caps = caps_of(profile, device_mem, host_mem, disk_mem=disk_mem)
        return PlanRequest(spec, step, profile, caps, policy, choices).allowed()

    def allowed(self, *, runs: bool = True) -> PlanRequest:
        """Return the request if its model and kernels are ones to plan with; of one memory with all
        homes fixed, since what moves within it frees nothing.

        Args:
            runs: whether twinstream's own kernels have to run the model.

        Raises:
            NotExecutableError: they do not.
            NondeterministicAttentionError: the attention is not deterministic, which is not
                allowed.
            ChoiceError: there is a disk, and no use for it.
        """
        if self.caps.disk_bytes is not None:
            require_use_of_disk(self.spec, self.step.recipe, self.machine, self.policy)
        if runs:
            require_executable(self.spec)
        if runs or self.step.recipe.kernels is not None:
            require_allowed(self.recipe.implementations)
        if self.machine.pool_bytes is not None and self.policy == DEFAULT_POLICY:
            return replace(self, choices=self.choices.of_one_memory)
        return self

    @property
    def decoder(self) -> ModelSpec:
        """The model, where only twinstream's own kernels will do.

        Raises:
            NotExecutableError: it is a traced module.
        """
        return require_decoder(self.spec)

    @property
    def recipe(self) -> Recipe:
        """The step's recipe, with kernels that suit the machine where it leaves them open."""
        recipe = self.step.recipe
        if recipe.kernels is not None:
            return recipe
        packing = self.step.packing
        packed = False if packing is None else packing.expected_lengths
        kernels = usual_kernels(self.machine, self.spec, packed=packed)
        return recipe.model_copy(update={"kernels": kernels})

    def with_optimizer(self, places: tuple[OptimizerPlace, ...]) -> PlanRequest:
        """With the optimizer where a policy has it: in the first of the places, or as it is.

        Raises:
            ChoiceError: the recipe clips, which is possible in none of the places.
        """
        return self.placed(places)[0]

    def placed(self, places: tuple[OptimizerPlace, ...]) -> tuple[PlanRequest, ...]:
        """One for each of the places where the recipe may have the optimizer: alone as it is.

        It is open in a recipe that names a place where it cannot be. `optimal` has all updates on
        the host, too, where the recipe says so.

        Raises:
            ChoiceError: the recipe clips, which is possible in none of the places.
        """
        recipe = self.recipe
        possible = recipe.places_among(places)
        if not possible:
            raise ChoiceError(
                f"policy '{self.policy}' has the optimizer '{places[0]}', which cannot clip "
                "gradients: plan with another policy, or without clipping"
            )
        usual = self.policy == DEFAULT_POLICY
        kept = recipe.places_among((*places, "host")) if usual else possible
        if recipe.optimizer in kept:
            possible = (recipe.optimizer,)
        recipes = [recipe.model_copy(update={"optimizer": place}) for place in possible]
        return tuple(replace(self, step=replace(self.step, recipe=each)) for each in recipes)

    def with_tokens(self, tokens_per_step: int) -> PlanRequest:
        """Return the request with so many tokens per step."""
        return replace(self, step=replace(self.step, tokens_per_step=tokens_per_step))

    def with_effort(self, effort: Effort) -> PlanRequest:
        """Return the request with an effort, which only `optimal` has."""
        if self.policy != DEFAULT_POLICY:
            return self
        return replace(self, choices=replace(self.choices, effort=effort))


def caps_of(
    machine: Machine, device_mem: str | int | None, host_mem: str | int | None, ranks: int = 1,
    *, disk_mem: str | int | None = None,
) -> Caps:  # fmt: skip
    """Return the caps given, and the device's reserve; a disk only where its cap is given.

    By default they are what `train` would take of such a machine with nothing else on it: the
    device's memory, and beside a GPU 0.8 of the host's. A memory's nominal size is all it has:
    24GiB on a card with 23.99.

    Args:
        ranks: so many share the machine's host memory and its drive, and on a CPU its device's;
            caps are of one.

    Raises:
        SizeError: a cap cannot be read, or is more memory than the machine has.
    """
    if (pool := machine.pool_bytes) is not None:
        caps = _caps_of_pool(machine, pool // ranks, device_mem, host_mem)
        return caps.model_copy(update={"disk_bytes": _disk_bytes(disk_mem, machine, ranks)})
    of_device = ranks if machine.device == "cpu" else 1
    host_bytes = _cap_bytes(host_mem, machine, "host_memory_bytes", ranks)
    if host_mem is None and host_bytes is not None and machine.device == "cuda":
        host_bytes = int(HOST_SHARE * host_bytes)
    return Caps(
        device_bytes=_cap_bytes(device_mem, machine, "device_memory_bytes", of_device),
        host_bytes=host_bytes,
        device_reserve_bytes=round(machine.number("device_reserve_bytes")),
        disk_bytes=_disk_bytes(disk_mem, machine, ranks),
    )


def _disk_bytes(given: str | int | None, machine: Machine, ranks: int) -> int | None:
    return None if given is None else _cap_bytes(given, machine, "disk_memory_bytes", ranks)


def require_use_of_disk(
    spec: AnyModel, recipe: Recipe, machine: Machine, policy: str = DEFAULT_POLICY
) -> None:
    """
    Raises:
        ChoiceError: a disk is of no use; says why, and what to do.
    """
    why = None
    if policy != DEFAULT_POLICY:
        why = f"policy '{policy}' has homes of its own: leave it out, or the disk"
    elif machine.pool_bytes is not None:
        why = f"{machine.name} has one memory, of which a disk is no part yet: leave it out"
    elif machine.disk_write_bytes_per_s is None and not (
        recipe.lora or recipe.frozen or spec.own_lora
    ):
        why = (
            "the rate at which it is written is not known, and without that it holds frozen "
            "weights alone, and all are trained here: add it, --disk-bandwidth 7GB/s,5GB/s, or "
            "--lora r=16, or --freeze"
        )
    if why is not None:
        raise ChoiceError(f"a disk (--disk, --disk-mem): {why}")


def with_drive(
    machine: Machine, bandwidth: str | float, source: str = "--disk-bandwidth"
) -> Machine:
    """Return the machine with a drive of a rate of reads, `7GB/s`, or of writes too, `7GB/s,5GB/s`.

    A drive without one of writes is only read. Reads and writes are assumed to take turns.

    Args:
        bandwidth: or bytes a second, of reads.
        source: of the numbers.

    Raises:
        SizeError: a rate cannot be read.
        ProfileError: it is no rate.
    """
    words = bandwidth.split(",") if isinstance(bandwidth, str) else [bandwidth]
    try:
        rates = [
            float(parse_bytes(one.strip().removesuffix("/s"))) if isinstance(one, str) else one
            for one in words
        ]
    except SizeError:
        rates = []
    if not 1 <= len(rates) <= 2:
        raise SizeError(
            f"{source} {bandwidth} is no rate: give one such as 7GB/s, with that of writes 7GB/s,"
            "5GB/s, or bytes a second"
        )
    stated = {"kind": "hypothetical", "source": source}
    fields = ("disk_read_bytes_per_s", "disk_write_bytes_per_s")
    document: dict[str, object] = dict.fromkeys(fields)
    document |= {name: {"value": rate, **stated} for name, rate in zip(fields, rates, strict=False)}
    assumed = {
        "disk_latency_ns": (1e5, "what a read or a write takes beside its bytes: 0.1 ms"),
        "disk_overlap": (1.0, "reads and writes take turns"),
    }
    for name, (value, why) in assumed.items():
        if getattr(machine, name) is None:
            document[name] = {"value": value, "kind": "assumed", "source": why}
    return changed(Machine, document, machine, source)


def with_endurance(machine: Machine, tbw: str | None) -> Machine:
    """Return the machine with what may be written to its drive; as it is where that is not given.

    Raises:
        SizeError: it is no size.
    """
    if tbw is None:
        return machine
    number = {"value": parse_bytes(tbw), "kind": "hypothetical", "source": "--disk-tbw"}
    return changed(Machine, {"disk_endurance_bytes": number}, machine, "--disk-tbw")


def _caps_of_pool(
    machine: Machine, pool: int, device_mem: str | int | None, host_mem: str | int | None
) -> Caps:
    """Return the caps of one memory: a tensor that is moved to the host's share frees nothing, so
    that all is the device's, but for what feeds it and what others are left.

    Raises:
        SizeError: a cap cannot be read, or both are more memory than the machine has.
    """
    usual = int(HOST_SHARE * pool)
    host_bytes = _cap_of(host_mem, machine, "host_memory_bytes", pool)
    device_bytes = _cap_of(device_mem, machine, "device_memory_bytes", pool)
    if host_mem is None:
        host_bytes = min(FEED_BYTES, usual // 2)
    if device_mem is None:
        device_bytes = max(1, usual - host_bytes)
    if device_bytes + host_bytes > pool:
        raise SizeError(
            f"--device-mem and --host-mem are {gib(device_bytes + host_bytes)} together, and "
            f"{machine.name} has one memory of {gib(pool)}: give --device-mem alone"
        )
    reserve = round(machine.number("device_reserve_bytes"))
    return Caps(device_bytes=device_bytes, host_bytes=host_bytes, device_reserve_bytes=reserve)


def _cap_bytes(given: str | int | None, machine: Machine, field: str, ranks: int) -> int | None:
    """Return the cap given, at most a rank's share of the memory that the profile states."""
    number = getattr(machine, field)
    if number is None or number.value is None:
        return None if given is None else _cap_of(given, machine, field, None)
    return _cap_of(given, machine, field, int(number.value / ranks))


@overload
def _cap_of(given: str | int | None, machine: Machine, field: str, has: int) -> int: ...


@overload
def _cap_of(given: str | int, machine: Machine, field: str, has: None) -> int: ...


def _cap_of(given: str | int | None, machine: Machine, field: str, has: int | None) -> int | None:
    """Return the cap given, at most the memory that there is, by default that."""
    if given is None:
        return has
    name = field.replace("memory_bytes", "mem")
    if isinstance(given, str):
        cap = parse_bytes(given, whole_bytes=has)
    else:
        cap = whole_bytes_of(name, given)
    if has is None or cap <= has:
        return cap
    if cap > _NOMINAL * has:
        flag = f"--{name.replace('_', '-')}"
        raise SizeError(
            f"{flag} {gib(cap)} is more than {machine.name} has, {gib(has)}; to ask about one "
            f'with more, give a profile: base = "{machine.name}" and {field} = {cap} in a TOML file'
        )
    return has
