"""Polynomials in the size of a chunk through measured points, exactly; and the points."""

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any

from torch import nn

from twinstream.executor.modules.batches import batches_of
from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.executor.modules.capture import capture
from twinstream.models.providers.traced import ModuleSource
from twinstream.models.providers.traced_parts import Poly

Size = tuple[int, int]  # B, S
_SHORT, _FEW = 16, 128  # tokens
_GROWS = 1.3  # times the operations of twice the tokens: state space models without their kernels
_THRESHOLDS = ("window", "chunk", "topk")  # of keys whose value is a length that changes masks


def fit(values: dict[Size, int]) -> tuple[Poly, float]:
    """A polynomial through all points but the last, and its relative error there."""
    *sizes, check = values
    powers, inverse, divisor = _inverse(tuple(sizes))
    known = [values[size] for size in sizes]
    coefficients: list[int | float] = [0] * 6
    for power, row in zip(powers, inverse, strict=True):
        times = sum(x * y for x, y in zip(row, known, strict=True))
        coefficients[power] = times // divisor if times % divisor == 0 else times / divisor
    while coefficients and coefficients[-1] == 0:
        coefficients.pop()
    poly = Poly(coefficients=tuple(coefficients))
    error = abs(poly.at(*check) - values[check]) / max(1, values[check])
    return poly, error


@lru_cache
def _inverse(sizes: tuple[Size, ...]) -> tuple[list[int], list[list[int]], int]:
    """Powers of the polynomial, and what times the values gives its coefficients: whole numbers,
    to be divided by the last."""
    powers = [0, 2, 4] if all(batch == 1 for batch, _ in sizes) else list(range(6))
    if len(sizes) > 1 and len({seq_len for _, seq_len in sizes}) == 1:
        powers = [0, 1]
    rows = [[(1, b, s, b * s, s * s, b * s * s)[power] for power in powers] for b, s in sizes]
    size = len(rows)
    table = [
        [Fraction(x) for x in (*row, *(int(i == j) for j in range(size)))]
        for i, row in enumerate(rows)
    ]
    for at in range(size):  # Gauss, exactly
        pivot = next(i for i in range(at, size) if table[i][at])
        table[at], table[pivot] = table[pivot], table[at]
        table[at] = [x / table[at][at] for x in table[at]]
        for i in range(size):
            if i != at and (factor := table[i][at]):
                table[i] = [x - factor * y for x, y in zip(table[i], table[at], strict=True)]
    inverse = [row[size:] for row in table]
    divisor = math.lcm(*(x.denominator for row in inverse for x in row))
    return powers, [[int(x * divisor) for x in row] for row in inverse], divisor


def seq_lens_like(source: ModuleSource, seq_len: int) -> tuple[int, int | None]:
    """The lengths around S that no window, chunk or maximum of the config separates."""
    low, high = 1, None
    config = source.config or {}
    for key, value in _numbers(config.get("text_config") or config):
        if any(part in key for part in _THRESHOLDS) and value > 1:
            if value <= seq_len:
                low = max(low, value)
            else:
                high = value - 1 if high is None else min(high, value - 1)
    return low, high


def _numbers(config: dict[str, Any]) -> list[tuple[str, int]]:
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((key, value))
    return found


def sizes_around(seq_len: int, low: int, high: int | None, is_packed: bool) -> list[Size]:
    """Points through which costs are fitted, and the last to check them, at S itself.

    Lengths are a multiple of 256 apart where that is possible, because scans pad to such. One
    sequence is no point: a repeated axis of length 1 spares copies.
    """
    if low == high:
        return [(batch, seq_len) for batch in (2, 3, 4)]
    below = (seq_len - max(low, seq_len // 4)) // 3
    above = (high or 4 * seq_len) - seq_len
    step = below if below >= 8 or below >= above // 3 else -(above // 3)
    grain = next(grain for grain in (256, 64, 16, 8, 1) if abs(step) >= grain or grain == 1)
    step = int(step / grain) * grain or 1
    lengths = [seq_len - i * step for i in (3, 2, 1, 0)]
    if is_packed:
        return [(1, length) for length in lengths]
    return [*((b, s) for s in lengths[:3] for b in (2, 3)), (4, lengths[3])]


def measured_sizes(
    module: nn.Module, source: ModuleSource, seq_len: int, is_packed: bool, longest: int | None
) -> tuple[list[Size], int, int | None]:
    """At which sizes of a chunk costs are measured, and from which to which S they hold.

    Args:
        longest: sequence that the module's positions reach to; longer ones are not looked at.

    Raises:
        ModuleRefusal: the module is of sequences of another length.
    """
    seq_len = seq_len if longest is None else min(seq_len, longest)
    low, high = seq_lens_like(source, seq_len)
    if (labels := batches_of(module).labels) is not None:
        return [(batch, labels) for batch in (2, 3, 4)], labels, labels
    if (fixed := getattr(module, "seq_len", None)) is not None:
        if fixed != seq_len:
            raise ModuleRefusal(
                f"{type(module).__name__} is of sequences of {fixed} tokens, as its `seq_len` "
                f"says, not of {seq_len}: --seq-len {fixed}"
            )
        low = high = seq_len
    most = min((n for n in (high, longest) if n is not None), default=None)
    length = _measured_length(module, seq_len, low, most, is_packed)
    return sizes_around(length, low, most, is_packed), low, high


def _measured_length(
    module: nn.Module, seq_len: int, low: int, high: int | None, is_packed: bool
) -> int:
    """Around which length costs are measured: S, but of a module that goes through a sequence token
    by token a short one, of which there are as many operations as tokens."""
    short = max(low, _SHORT)
    if seq_len <= _FEW or low == high or (high is not None and 2 * short > high):
        return seq_len
    batch = 1 if is_packed else 2
    few, more = (
        capture(module, (batch, length), is_packed, once=True).num_operations
        for length in (short, 2 * short)
    )
    return max(low, _FEW) if more > _GROWS * few else seq_len
