"""Attention implementations by name, so that a plan can be refused without torch."""

from twinstream.models.kernel_costs.attention_libraries import (
    ATTENTIONS,
    AttentionFacts,
    DeviceName,
)
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError


class UnknownAttentionError(TwinstreamError):
    """No attention implementation of that name."""


def attention_names() -> tuple[str, ...]:
    """Return the names of all implementations, whether they can run here or not."""
    return tuple(ATTENTIONS)


def attention_limits(name: str) -> AttentionFacts:
    """Return what is known of an implementation.

    Raises:
        UnknownAttentionError: the message lists those there are.
    """
    if name not in ATTENTIONS:
        raise UnknownAttentionError(
            f"attention implementation '{name}' is unknown; known implementations: "
            f"{', '.join(ATTENTIONS)}"
        )
    return ATTENTIONS[name]


def attention_refusal(
    name: str, device: DeviceName, dtype: str, head_dim: int, capability: int | None = None
) -> str | None:
    """Return why an implementation cannot compute such heads on a kind of device, or None.

    `capability` is the device's major compute capability; None is unknown, and not refused.

    Raises:
        UnknownAttentionError: there is none of that name.
    """
    limits = attention_limits(name)
    if limits.device is not None and limits.device != device:
        return f"it runs on {limits.device}, not on {device}"
    if limits.capabilities and capability is not None and capability not in limits.capabilities:
        made_for = ", ".join(str(major) for major in limits.capabilities)
        return f"it is for compute capability {made_for}, not {capability}"
    return limits.refusal(dtype, head_dim)


def nondeterministic_kernels(schedule: RankSchedule) -> tuple[str, ...]:
    """Return the kernels that give other bits from run to run; empty where none does."""
    names = {call.attributes.get("attention") for call in schedule.calls.values()}
    known = sorted(name for name in names if isinstance(name, str) and name in ATTENTIONS)
    return tuple(f"attention {name}" for name in known if not ATTENTIONS[name].deterministic)
