"""From the options of a command to the plan that they ask for."""

from dataclasses import replace
from math import nan
from typing import Any

from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.loss import has_function, kind_of_loss
from twinstream.models.model import AnyModel, with_aux_loss
from twinstream.models.presets import model_notes
from twinstream.models.recipe import KernelChoice, Recipe, recipe_of_fields
from twinstream.planner.choices import ChoiceError, Choices, recompute_level
from twinstream.planner.kernel_choice import kernels_named
from twinstream.planner.policies import ON_DEVICE, optimizer_places
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import SizeError, parse_number
from twinstream.schedule.workload import Packing
from twinstream.tracing import find_model, path_notes

_LONGEST_SIZE = 40
_MOST_LENGTHS = 4096
_TOO_LONG = 10**9


class ShareError(TwinstreamError):
    """A share that cannot be read."""


class LengthsError(TwinstreamError):
    """Lengths of sequences that cannot be read."""


def request_of(wanted: PlanOptions, machine: Machine | None = None) -> PlanRequest:
    """What the options ask of one device.

    Args:
        machine: in place of the one that the options name.

    Raises:
        TwinstreamError: one cannot be read, is unknown, or does not go with another.
    """
    assert wanted.model is not None and wanted.seq_len is not None
    if machine is None:
        assert wanted.machine is not None
        machine = load_machine(wanted.machine)
    for size in (wanted.device_mem, wanted.host_mem):
        if size is not None and len(size) > _LONGEST_SIZE:
            raise SizeError(
                f"'{size[:_LONGEST_SIZE]}...' is no size; write it as 24GiB, 80% or bytes"
            )
    policy, lengths = wanted.policy, lengths_of(wanted.seq_len)
    choices, overhead = _choices(wanted), wanted.optimizer_overhead
    if overhead is not None and wanted.tokens_per_step is not None:
        raise ShareError(
            "--optimizer-overhead proposes tokens per step where none are given; leave out "
            "either it or --tokens-per-step"
        )
    spec, unequal = spec_of(wanted), len(set(lengths)) > 1
    kernels = kernels_named(
        machine, spec, wanted.kernels, wanted.attention, nondeterministic=wanted.nondeterministic,
        packed=lengths if unequal else kind_of_loss(wanted.loss).sides > 1,
    )  # fmt: skip
    step = TrainingStep(
        max(lengths), wanted.tokens_per_step, wanted.chunk_tokens, wanted.chunks_per_round,
        recipe=recipe_of(wanted, policy, kernels, spec),
        packing=Packing.of(lengths) if unequal else None,
    )  # fmt: skip
    if overhead is not None:
        step = replace(step, optimizer_overhead=share_of(overhead))
    return PlanRequest.of(
        spec, machine, step=step, device_mem=wanted.device_mem, host_mem=wanted.host_mem,
        policy=policy, choices=choices,
    )  # fmt: skip


def _choices(wanted: PlanOptions) -> Choices:
    homes: dict[str, Any] = {}
    for text in wanted.home:
        kind, found, where = text.partition("=")
        if not found or kind in homes:
            wrong = "twice" if found else "without a place"
            raise ChoiceError(
                f"--home '{text}' names '{kind}' {wrong}; write each kind once, as parameter=host"
            )
        homes[kind] = where
    level = None if wanted.recompute is None else recompute_level(wanted.recompute)
    return Choices(homes, level, wanted.prefetch, wanted.effort)


def spec_of(wanted: PlanOptions) -> AnyModel:
    """The model, in the dtype asked for."""
    assert wanted.model is not None and wanted.seq_len is not None
    longest = max(lengths_of(wanted.seq_len))
    found = find_model(
        wanted.model, dtype=wanted.dtype, longest=longest, lora=wanted.lora, loss=wanted.loss,
        trust_remote_code=wanted.trust_remote_code,
    )  # fmt: skip
    return with_aux_loss(found, wanted.aux_loss)


def notes_of(wanted: PlanOptions) -> list[str]:
    """What to know of the model's file, and by what it is computed."""
    if wanted.model is None:
        return []
    notes = model_notes(wanted.model, wanted.dtype)
    if has_function(wanted.loss) or wanted.trust_remote_code:
        return notes
    longest = None if wanted.seq_len is None else max(lengths_of(wanted.seq_len))
    return notes + path_notes(wanted.model, wanted.dtype, longest, wanted.lora)


def recipe_of(
    wanted: PlanOptions, policy: str, kernels: KernelChoice | None, spec: AnyModel
) -> Recipe:
    """What the options say of how the model is trained."""
    require_known("--optimizer", wanted.optimizer, ON_DEVICE)
    places = optimizer_places(policy)
    if wanted.optimizer is not None and wanted.optimizer not in places:
        raise ChoiceError(
            f"policy '{policy}' has the optimizer '{places[0]}', not {wanted.optimizer}: leave out "
            "--optimizer"
        )
    optimizer = wanted.optimizer or ON_DEVICE[0]
    own = {"kernels": kernels, "optimizer": optimizer, "clips": wanted.clips}
    return recipe_of_fields(wanted.recipe_fields(spec) | own)


def require_known(flag: str, name: str | None, known: tuple[str, ...]) -> None:
    """Refuse a name that is none of those.

    Raises:
        ChoiceError: it lists them.
    """
    if name is not None and name not in known:
        raise ChoiceError(f"{flag} '{name}' is unknown; known: {', '.join(known)}")


def share_of(text: str) -> float:
    """
    >>> share_of("1%"), share_of("0.01")
    (0.01, 0.01)
    """
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = nan
    if not 0.0 < number < 1.0:
        raise ShareError(
            f"--optimizer-overhead '{text}' is no share between 0 and 1; write it as 1% or 0.01"
        )
    return number


def lengths_of(text: str) -> tuple[int, ...]:
    """
    >>> lengths_of("8k"), lengths_of("300,212,512")
    ((8192,), (300, 212, 512))
    """
    numbers = [parse_number(part) for part in text.split(",", _MOST_LENGTHS)]
    lengths = [one for one in numbers if isinstance(one, int) and 0 < one < _TOO_LONG]
    if len(numbers) > _MOST_LENGTHS or len(lengths) < len(numbers):
        raise LengthsError(
            f"--seq-len '{text[:_LONGEST_SIZE]}' is no length of sequences: give tokens from 1 to "
            f"999999999, or the lengths of up to {_MOST_LENGTHS} packed sequences as 300,212,512"
        )
    return tuple(lengths)
