"""Attention implementations by name."""

from twinstream.executor.kernels.attention.eager import attention_backward, attention_forward
from twinstream.executor.kernels.attention.implementation import AttentionImplementation
from twinstream.schedule.errors import TwinstreamError

_IMPLEMENTATIONS = (
    AttentionImplementation(
        name="eager",
        deterministic=True,
        forward=attention_forward,
        backward=attention_backward,
    ),
)


def attention_implementation(name: str) -> AttentionImplementation:
    """Return an implementation by name.

    Raises:
        TwinstreamError: there is none of that name; the message lists those there are.
    """
    for implementation in _IMPLEMENTATIONS:
        if implementation.name == name:
            return implementation
    known = ", ".join(implementation.name for implementation in _IMPLEMENTATIONS)
    raise TwinstreamError(f"attention implementation '{name}' is unknown; known: {known}")
