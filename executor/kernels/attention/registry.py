"""Attention implementations by name, and which of them can run here."""

import torch

from twinstream.executor.kernels.attention.cudnn_frontend import CudnnFrontend
from twinstream.executor.kernels.attention.eager import EagerAttention
from twinstream.executor.kernels.attention.flash import Flash2, Flash3, Flash4
from twinstream.executor.kernels.attention.implementation import AttentionImplementation
from twinstream.executor.kernels.attention.query_slices import CudnnSliced
from twinstream.executor.kernels.attention.sdpa import SdpaCpu, SdpaCudnn, SdpaFlash
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import MOST_MULTIPROCESSORS, AttentionShape
from twinstream.schedule.errors import TwinstreamError

_KINDS: tuple[type[AttentionImplementation], ...] = (
    EagerAttention, SdpaCpu, SdpaFlash, SdpaCudnn, Flash2, Flash3, Flash4, CudnnFrontend,
    CudnnSliced,
)  # fmt: skip
_IMPLEMENTATIONS: dict[str, AttentionImplementation] = {kind.name: kind() for kind in _KINDS}


class AttentionNotAvailable(TwinstreamError):
    """An attention implementation is asked for that cannot run here, or not on this shape."""


def attention_implementation(name: str) -> AttentionImplementation:
    """Return an implementation by name, whether it can run here or not.

    Raises:
        UnknownAttentionError: there is none of that name; the message lists those there are.
    """
    attention_limits(name)  # raises
    return _IMPLEMENTATIONS[name]


def attention_reason(
    name: str, device: DeviceName, shape: AttentionShape | None = None
) -> str | None:
    """Why an implementation cannot run on this machine's device, or on a shape; None if it can.

    Raises:
        UnknownAttentionError: there is none of that name.
    """
    implementation = attention_implementation(name)
    limits = attention_limits(name)
    if limits.device is not None and limits.device != device:
        return f"it runs on {limits.device}, not on {device}"
    if limits.device == "cuda" and (reason := _cuda_reason(limits.capabilities)):
        return reason
    if reason := implementation.missing():
        return reason
    return limits.refusal(shape.dtype, shape.head_dim) if shape is not None else None


def available_attention(device: DeviceName, shape: AttentionShape | None = None) -> tuple[str, ...]:
    """The implementations that can run here; none where there is no such device."""
    if device == "cuda" and _cuda_reason(()):
        return ()
    return tuple(n for n in _IMPLEMENTATIONS if attention_reason(n, device, shape) is None)


def require_attention(name: str, device: DeviceName, shape: AttentionShape | None = None) -> None:
    """
    Raises:
        AttentionNotAvailable: the message says why, what to install, and which can run.
    """
    if reason := attention_reason(name, device, shape):
        which = ", ".join(available_attention(device, shape)) or "none"
        what = f" for {shape}" if shape is not None else ""
        raise AttentionNotAvailable(
            f"attention '{name}' cannot run here{what}: {reason}. On this machine's {device} can: "
            f"{which}; plan with --attention and one of them"
        )


def _cuda_reason(known: tuple[int, ...]) -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if known and properties.major not in known:
        return (
            f"it is for compute capability {', '.join(str(major) for major in known)}, and "
            f"{properties.name} has {properties.major}.{properties.minor}"
        )
    if known and properties.multi_processor_count > MOST_MULTIPROCESSORS:
        return (
            f"{properties.name} has {properties.multi_processor_count} multiprocessors, and its "
            f"memory is known for at most {MOST_MULTIPROCESSORS}"
        )
    return None
