"""Before a run: each shape of attention in a schedule, once, on random data, must be finite.

Attention libraries have given NaN for some lengths only, and silently.
"""

from collections.abc import Iterator

import torch

from twinstream.executor.kernels.attention.registry import (
    attention_implementation,
    require_attention,
)
from twinstream.executor.kernels.attention.trial import AttentionTrial
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.models.kernel_costs.attention_shape import AttentionShape
from twinstream.models.kernel_costs.attributes import typed_attribute
from twinstream.models.kernel_costs.scratch.block_sizes import attention_shape
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError

# The oracle of the others needs no canary.
_ORACLE = "eager"


class AttentionCanaryError(TwinstreamError):
    """An attention implementation gives NaN or infinity on a shape of the schedule."""


def require_runnable_attention(schedule: RankSchedule, device: DeviceName) -> None:
    """
    Raises:
        AttentionNotAvailable: an attention of the schedule cannot run here; what to install, and
            which can.
    """
    for name, shape in _attention_of(schedule):
        require_attention(name, device, shape)


def check_attention(schedule: RankSchedule, device: DeviceName) -> None:
    """Run each attention of a schedule once, forward and backward; takes memory for one call.

    Raises:
        AttentionNotAvailable: one cannot run here.
        AttentionCanaryError: one leaves NaN or infinity in its results.
    """
    require_runnable_attention(schedule, device)
    with torch.no_grad():
        for name, shape in _attention_of(schedule):
            if name != _ORACLE:
                check_shape(name, shape, device)
    if device == "cuda":
        torch.cuda.empty_cache()


def check_shape(name: str, shape: AttentionShape, device: DeviceName) -> None:
    """
    Raises:
        AttentionCanaryError: results are not finite, with ordinary or with low scores.
    """
    trial = AttentionTrial(attention_implementation(name), shape, torch.device(device))
    bad = trial.results().not_finite()
    if not bad:
        trial.lower_scores()
        bad = trial.results().not_finite()
    if bad:
        raise AttentionCanaryError(
            f"attention '{name}' leaves NaN or infinity in {', '.join(bad)} for {shape}, on random "
            "data: plan with another --attention, or other --chunk-tokens"
        )


def _attention_of(schedule: RankSchedule) -> Iterator[tuple[str, AttentionShape]]:
    """Each name and shape once, in a fixed order."""
    found: dict[tuple[str, AttentionShape], None] = {}
    for call in schedule.calls.values():
        if "attention" in call.attributes:
            name = typed_attribute(call.attributes, "attention", str)
            found[name, attention_shape(call.attributes)] = None
    return iter(found)
