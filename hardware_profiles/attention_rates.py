"""The rate of an attention implementation relative to another's, where a profile lacks its own."""

from dataclasses import dataclass

# The executor's registry, by name: what a curve may be of.
IMPLEMENTATIONS = (
    *("eager", "sdpa_cpu", "sdpa_flash", "sdpa_cudnn"),
    *("flash2", "flash3", "flash4", "cudnn_frontend", "cudnn_sliced"),
)

# TFLOP/s by major compute capability and unit of work, side by side on one device. Of 9: told of
# H100s, causal, head_dim 128, 8,192 tokens, bf16, the backward deterministic but for cuDNN's; not
# measured by us. flash-attn 2 is taken to be as fast as torch's FlashAttention-2, whose kernels it
# shares.
_RATES: dict[int, dict[str, dict[str, float]]] = {
    9: {
        "attention_forward": {
            **dict.fromkeys(("sdpa_flash", "flash2"), 306),
            "sdpa_cudnn": 566,
            **dict.fromkeys(("flash3", "flash4"), 660),
        },
        "attention_backward": {
            **dict.fromkeys(("sdpa_flash", "flash2"), 166),
            "sdpa_cudnn": 470,
            **dict.fromkeys(("flash3", "flash4"), 474),
        },
    }
}
_SOURCES = {9: "H100, causal, head_dim 128, 8,192 tokens; not measured by us"}


@dataclass(frozen=True)
class Ratio:
    """Rate of an implementation over that of another; `source` is None where nothing is known."""

    value: float
    source: str | None = None


SAME = Ratio(1.0)


def attention_ratio(unit: str, implementation: str, other: str, capability: int | None) -> Ratio:
    """Return how much faster one runs than the other on devices of a major compute capability.

    Where nothing is known it is taken as 1.

    >>> round(attention_ratio("attention_backward", "sdpa_flash", "flash3", 9).value, 2)
    0.35
    """
    rates = _RATES.get(capability or 0, {}).get(unit, {})
    if capability is None or implementation not in rates or other not in rates:
        return SAME
    return Ratio(rates[implementation] / rates[other], _SOURCES[capability])
