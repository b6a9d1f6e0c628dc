"""Which kernels a step is planned with, where the user leaves it open."""

from typing import Literal, get_args

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.attention_limits import attention_refusal
from twinstream.models.attention_scratch import attention_names
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError

KernelsOption = Literal["auto", "eager", "triton"]


class UnknownKernelsError(TwinstreamError):
    """Kernels that nobody implements."""


class UnsuitableAttentionError(TwinstreamError):
    """An attention implementation that does not compute the model on the machine's device."""


def attention_for(machine: Machine, spec: ModelSpec, attention: str = "auto") -> str:
    """The one named; `auto` is the first that computes the model of those that follow.

    On CUDA what the profile names, PyTorch's flash kernels, eager attention; on a CPU the last.

    Raises:
        UnknownAttentionError: there is none of that name.
        UnsuitableAttentionError: it does not compute the model, or not on that device.
    """

    capability = machine.compute_capability.major if machine.compute_capability else None

    def refusal(name: str) -> str | None:
        return attention_refusal(name, machine.device, spec.dtype, spec.head_dim, capability)

    if attention == "auto":
        wanted = ["eager"]
        if machine.device == "cuda":
            wanted.insert(0, "sdpa_flash")
            if machine.attention is not None:
                wanted.insert(0, machine.attention.name)
        return next(name for name in wanted if refusal(name) is None)
    if reason := refusal(attention):
        suitable = ", ".join(name for name in attention_names() if refusal(name) is None)
        raise UnsuitableAttentionError(
            f"--attention {attention} does not do for '{spec.name}' on '{machine.name}': {reason}; "
            f"these do: {suitable}"
        )
    return attention


def usual_recipe(machine: Machine, spec: ModelSpec) -> Recipe:
    """The recipe that `plan` takes where nothing of it is given."""
    return Recipe(kernels=kernels_for(machine, attention=attention_for(machine, spec)))


def kernels_for(machine: Machine, kernels: str = "auto", attention: str = "eager") -> KernelChoice:
    """Those named; `auto` is Triton for a CUDA device and torch's own ops for a CPU.

    Raises:
        UnknownKernelsError: there are none of that name.
    """
    if kernels == "triton" or (kernels == "auto" and machine.device == "cuda"):
        return KernelChoice(vector="triton", attention=attention)
    if kernels in ("auto", "eager"):
        return KernelChoice(vector="eager", attention=attention)
    known = ", ".join(get_args(KernelsOption))
    raise UnknownKernelsError(f"--kernels '{kernels}' is unknown; known: {known}")
