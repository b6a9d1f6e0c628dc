"""Which kernels a step is planned with, where the user leaves that open."""

from collections.abc import Sequence
from typing import Literal, get_args

from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.curve_choice import curve_for
from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.kernel_costs.attention_limits import (
    attention_limits,
    attention_names,
    attention_refusal,
)
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.model import AnyModel
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Packing, Workload

# By major compute capability, where torch's FlashAttention-2 is slow; the fastest first.
_FASTER_FROM_LIBRARIES = {9: ("flash4", "flash3"), 10: ("flash4", "flash3")}
# What a call for each document costs beside its launch: the host waits for the lengths, and a short
# document does not fill the device. Assumed, on the safe side; no GPU has timed it.
_OF_EACH_CALL_NS = 100_000.0
KernelsOption = Literal["auto", "eager", "triton"]
Packed = Sequence[int] | bool
"""Whether sequences of unequal lengths are packed; or the lengths that are expected."""


class UnknownKernelsError(TwinstreamError):
    """Kernels are named that nobody implements."""


class UnsuitableAttentionError(TwinstreamError):
    """The attention implementation does not compute the model on the machine's device."""


class NondeterministicAttentionError(TwinstreamError):
    """The attention does not give the same bits from run to run, which was not allowed."""


def attention_for(
    machine: Machine, spec: AnyModel, attention: str = "auto", *, nondeterministic: bool = False,
    packed: Packed = False, here: bool = False,
) -> str:  # fmt: skip
    """The one named; `auto` is the first that computes the model of those that follow.

    On CUDA what the profile names, PyTorch's flash kernels, eager attention; on a CPU the last.
    What is installed on this machine decides only where the step is computed `here`: then what is
    missing is passed over, and on Hopper and Blackwell flash-attn 4 and 3 are tried, too.
    `nondeterministic` allows to name one that does not give the same bits from run to run; `auto`
    never takes one. For sequences `packed` of unequal lengths it takes one that is called for each
    of them only where that is predicted to be faster for the lengths that are expected.

    Raises:
        UnknownAttentionError: there is none of that name.
        UnsuitableAttentionError: it does not compute the model, or not on that device.
        NondeterministicAttentionError: it is not deterministic, and that is not allowed.
    """

    if (head_dim := spec.head_dim) is None:
        if attention not in ("auto", "eager", spec.attention):
            raise UnsuitableAttentionError(
                f"--attention {attention} is one of twinstream's own kernels; the traced module "
                f"'{spec.name}' computes its own: {spec.attention}"
            )
        return "eager"

    capability = machine.compute_capability.major if machine.compute_capability else None

    def refusal(name: str) -> str | None:
        return attention_refusal(name, machine.device, spec.dtype, head_dim, capability)

    if attention == "auto":
        wanted = ["eager"]
        if machine.device == "cuda":
            wanted.insert(0, "sdpa_flash")
            if here:
                wanted[:0] = _FASTER_FROM_LIBRARIES.get(capability or 0, ())
            if machine.attention is not None:
                wanted.insert(0, machine.attention.name)
        suitable = [
            name
            for name in wanted
            if refusal(name) is None and _same_bits(name) and (_is_installed(name) or not here)
        ]
        if not packed:
            return suitable[0]
        for_all = [one for one in suitable if one == "eager" or _takes_any_lengths(one)]
        before = suitable[: suitable.index(for_all[0])]
        if packed is True or not before or spec.decoder is None:
            return for_all[0]
        return _fastest_of_packed(machine, spec.decoder, for_all[0], before, packed)
    if reason := refusal(attention):
        those = ", ".join(name for name in attention_names() if refusal(name) is None)
        raise UnsuitableAttentionError(
            f"--attention {attention} does not do for '{spec.name}' on '{machine.name}': {reason}; "
            f"these do: {those}"
        )
    require_allowed(KernelChoice(attention=attention, deterministic=not nondeterministic))
    return attention


def faster_attention(machine: Machine, dtype: str, head_dim: int, chosen: str) -> str | None:
    """The fastest attention that computes the model on this GPU and is not installed here.

    None where one is installed that is as usual on such GPUs, or nothing faster is usual.
    """
    capability = machine.compute_capability.major if machine.compute_capability else 0
    usual = _FASTER_FROM_LIBRARIES.get(capability, ())
    if machine.device != "cuda" or chosen in usual:
        return None
    return next(
        (
            name
            for name in usual
            if not _is_installed(name)
            and attention_refusal(name, "cuda", dtype, head_dim, capability) is None
        ),
        None,
    )


def _is_installed(attention: str) -> bool:
    library = attention_limits(attention).library
    return library is None or library.missing() is None


def _takes_any_lengths(attention: str) -> bool:
    return attention_limits(attention).variable_length


def _same_bits(attention: str) -> bool:
    return attention_limits(attention).deterministic


def require_allowed(kernels: KernelChoice) -> None:
    """
    Raises:
        NondeterministicAttentionError: the attention is not deterministic, and that is not allowed.
        UnknownAttentionError: there is none of that name.
    """
    if kernels.deterministic and not _same_bits(kernels.attention):
        those = ", ".join(name for name in attention_names() if _same_bits(name))
        raise NondeterministicAttentionError(
            f"attention '{kernels.attention}' does not give the same bits from run to run: allow "
            f"it with --nondeterministic (in Python KernelChoice(attention='{kernels.attention}', "
            f"deterministic=False)), or take one that does: {those}"
        )


def kernels_named(
    machine: Machine,
    spec: AnyModel,
    kernels: str | None,
    attention: str | None,
    *,
    nondeterministic: bool = False,
    packed: Packed = False,
) -> KernelChoice | None:
    """Those that are named, `auto` where only the other is; None where neither is.

    Raises:
        TwinstreamError: there are none of that name, or they do not do for the model there.
    """
    if kernels is None and attention is None:
        return None
    chosen = attention_for(
        machine, spec, attention or "auto", nondeterministic=nondeterministic, packed=packed
    )
    return kernels_for(machine, kernels or "auto", chosen)


def usual_kernels(
    machine: Machine, spec: AnyModel, *, packed: Packed = False, here: bool = False
) -> KernelChoice:
    """What a plan takes where nothing of it is given, of a machine elsewhere or of the one here."""
    return kernels_for(machine, attention=attention_for(machine, spec, packed=packed, here=here))


def kernels_for(machine: Machine, kernels: str = "auto", attention: str = "eager") -> KernelChoice:
    """Return the kernels named; `auto` is Triton for a CUDA device and torch's own ops for a CPU.

    Raises:
        UnknownKernelsError: there are none of that name.
    """
    same_bits = _same_bits(attention)
    if kernels == "triton" or (kernels == "auto" and machine.device == "cuda"):
        return KernelChoice(vector="triton", attention=attention, deterministic=same_bits)
    if kernels in ("auto", "eager"):
        return KernelChoice(vector="eager", attention=attention, deterministic=same_bits)
    known = ", ".join(get_args(KernelsOption))
    raise UnknownKernelsError(f"--kernels '{kernels}' is unknown; known: {known}")


def _fastest_of_packed(
    machine: Machine, spec: ModelSpec, for_all: str, for_each: Sequence[str], lengths: Sequence[int]
) -> str:
    """`for_all`, which takes documents of any lengths in one call, or a faster one of `for_each`.

    The others are called for one document after the other. One of which the profile states no rate
    of its own is never taken.

    Args:
        lengths: tokens of the documents of a chunk, as they are expected.
    """
    best, best_ns = for_all, _pack_ns(machine, spec, for_all, lengths)
    for name in for_each:
        ns = _pack_ns(machine, spec, name, lengths)
        if ns is not None and best_ns is not None and ns < best_ns:
            best, best_ns = name, ns
    return best


def _pack_ns(
    machine: Machine, spec: ModelSpec, name: str, lengths: Sequence[int]
) -> float | None:  # fmt: skip
    """Attention forward and backward of a block; None where nothing is known of it."""
    tokens, packing = sum(lengths), Packing.of(tuple(lengths))
    workload = Workload(
        seq_len=tokens, chunk_tokens=tokens, chunks_per_round=1, rounds_per_step=1, packing=packing
    )
    recipe = Recipe(kernels=KernelChoice(attention=name))
    work = ChunkWork(spec, workload, 0, recipe)
    both = (work.attention_forward(), work.attention_backward())
    takes_all = attention_limits(name).variable_length
    try:
        if not takes_all and any(curve_for(one, machine).of != name for one in both):
            return None
        alone_ns = sum(work_time(one, machine).alone_ns for one in both)
    except MissingNumberError:
        return None
    return alone_ns + (0 if takes_all else len(both) * len(lengths) * _OF_EACH_CALL_NS)
