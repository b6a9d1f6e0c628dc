"""Which kernels a step is planned with, where the user leaves it open."""

from typing import Literal, get_args

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.recipe import KernelChoice
from twinstream.schedule.errors import TwinstreamError

KernelsOption = Literal["auto", "eager", "triton"]


class UnknownKernelsError(TwinstreamError):
    """Kernels that nobody implements."""


def kernels_for(machine: Machine, kernels: str = "auto") -> KernelChoice:
    """Those named; `auto` is Triton for a CUDA device and torch's own ops for a CPU.

    Raises:
        UnknownKernelsError: there are none of that name.
    """
    match kernels:
        case "auto":
            return KernelChoice(vector="triton" if machine.device == "cuda" else "eager")
        case "eager" | "triton":
            return KernelChoice(vector=kernels)
    known = ", ".join(get_args(KernelsOption))
    raise UnknownKernelsError(f"--kernels '{kernels}' is unknown; known: {known}")
