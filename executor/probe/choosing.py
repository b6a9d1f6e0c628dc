"""Choose the kernels of a CUDA device: the fastest that compute the right results there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch

from twinstream.executor.kernels.attention.registry import require_attention
from twinstream.executor.kernels.availability import KernelsUnavailableError, vector_reason
from twinstream.executor.probe.chains import probe_chains
from twinstream.executor.probe.chosen import Chosen
from twinstream.executor.probe.process import DeviceProcess, JobFailed, JobRefused, JobTimeout
from twinstream.executor.probe.tasks.attention import (
    AttentionCandidate,
    attention_cases,
    try_attention,
)
from twinstream.executor.probe.tasks.trial import TOLERANCE, differs_from_eager
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.models.kernel_costs.attention_limits import (
    attention_limits,
    attention_names,
)
from twinstream.models.recipe import KernelChoice
from twinstream.models.spec import ModelSpec

_AnswerT = TypeVar("_AnswerT")
VectorName = Literal["triton", "eager"]
TRY_LIMIT_S = 150.0  # flash-attn 4 takes 10 to 17 s to import, and more to compile; so may Triton


@dataclass(frozen=True)
class Tries:
    """The device's process, and the seconds left for all tries together.

    Each try is one job, so that one that breaks the process breaks only itself.
    """

    process: DeviceProcess[DeviceName]
    left_s: Callable[[], float] = lambda: math.inf

    def ask(self, job: Callable[[DeviceName], _AnswerT]) -> _AnswerT | JobRefused | JobFailed:
        """The answer, or why there is none.

        Raises:
            JobTimeout: there is no time left, so that nothing can be said of what was tried.
        """
        within_s = min(TRY_LIMIT_S, self.left_s())
        try:
            if within_s > 0.0:
                return self.process.do(job, within_s)
        except (JobRefused, JobFailed) as error:
            if not isinstance(error, JobTimeout) or within_s == TRY_LIMIT_S:
                return error
        raise JobTimeout("no time left to try all kernels")


def choose_kernels(
    tries: Tries,
    presets: tuple[str, ...],
    attention: str | None = None,
    vectors: Sequence[VectorName] = ("triton", "eager"),
) -> Chosen:
    """The attention named, else the best on the shapes of these presets; the first vector kernels
    that are right with it.

    Raises:
        JobFailed: no attention is right here, no vector kernels are, or time ran out.
    """
    notes: list[str] = []
    excess_bytes, others = 0, tuple[str, ...]()
    if attention is None:
        attention, excess_bytes, others = _best_attention(tries, presets, notes)
    for vector in vectors:
        kernels = KernelChoice(
            vector=vector,
            attention=attention,
            deterministic=attention_limits(attention).deterministic,  # what is named is allowed
        )
        fault = tries.ask(partial(kernels_fault, kernels=kernels))
        if fault is None:
            return Chosen(
                kernels=kernels, notes=tuple(notes), excess_bytes=excess_bytes, others=others
            )
        notes.append(f"{vector} kernels with attention {attention} are left out: {fault}")
    raise JobFailed("; ".join(notes))


def attention_try(device: DeviceName, name: str, presets: tuple[str, ...]) -> AttentionCandidate:
    """One implementation on the shapes that these presets' runs have, in bf16."""
    cases = [
        case
        for chain in probe_chains(KernelChoice(), presets)
        for case in attention_cases(ModelSpec.model_validate(chain.model.spec), chain.workload)
    ]
    return try_attention(name, cases, device)


def kernels_fault(device: DeviceName, kernels: KernelChoice) -> str | None:
    """Return how these kernels get a round of a small model wrong (bf16, CUDA), or None.

    Raises:
        KernelsUnavailableError: vector kernels cannot run here.
        AttentionNotAvailable: attention cannot.
    """
    if reason := vector_reason(kernels.vector, device):
        raise KernelsUnavailableError(reason)
    require_attention(kernels.attention, device)
    dtype = "bfloat16" if device == "cuda" else "float32"
    found, tolerance = differs_from_eager(kernels, torch.device(device), dtype), TOLERANCE[dtype]
    if found.relative <= tolerance:
        return None
    return f"{found.tensor} is {found.relative:.1e} off the eager kernels, over {tolerance:.0e}"


def _best_attention(
    tries: Tries, presets: tuple[str, ...], notes: list[str]
) -> tuple[str, int, tuple[str, ...]]:
    """The fastest that is right and deterministic, and those that are right without being that.

    Never eager: it is right, but so slow that figures made with it would tell nothing.
    The bytes between are what any of them takes beyond what plans count with.
    """
    right: list[AttentionCandidate] = []
    for name in attention_names():
        if name == "eager":
            continue
        tried = tries.ask(partial(attention_try, name=name, presets=presets))
        if isinstance(tried, AttentionCandidate) and tried.refused is None:
            right.append(tried)
            notes.append(_attention_note(tried))
        else:
            fault = tried.refused if isinstance(tried, AttentionCandidate) else tried
            notes.append(f"attention {name} is left out: {fault}")
    usable = [tried for tried in right if tried.deterministic]
    if not usable:
        raise JobFailed(f"no attention is right here: {'; '.join(notes)}")
    best = min(usable, key=lambda tried: tried.time_ns)
    others = [tried for tried in right if not tried.deterministic]
    excess_bytes = max(tried.excess_bytes for tried in (best, *others))
    return best.name, excess_bytes, tuple(tried.name for tried in others)


def _attention_note(tried: AttentionCandidate) -> str:
    note = f"attention {tried.name}: {tried.time_ns / 1e6:.2f} ms"
    if not tried.deterministic:
        note += ", not deterministic"
    if not tried.excess_bytes:
        return note
    return (
        f"{note}; it takes {tried.excess_bytes} bytes of device memory more than it declares "
        "(reserved by the profile where it is chosen)"
    )
