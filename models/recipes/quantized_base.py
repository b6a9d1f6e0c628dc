"""Frozen blocks in few bits: matrices as codes, with a float32 scale for each block of them.

`8bit` is a whole number from -127 to 127 and a scale for every 256 elements, 8.125 bits each; `nf4`
one of 16 levels and a scale for every 64, 4.5 bits. A scale is the largest magnitude of its block,
which begins anew at no row: elements are counted through the matrix, as in its file. Norms,
biases and routers stay as they are.

Source of nf4: Dettmers et al., QLoRA, arXiv:2305.14314, section 3 and appendix E.
"""

from math import prod
from typing import Literal

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import FlatLayout, InnerTensor, aligned, dense_width
from twinstream.schedule.errors import TwinstreamError

BaseFormat = Literal["model", "8bit", "nf4"]
BLOCK_ELEMENTS = {"8bit": 256, "nf4": 64}
CODE_BITS = {"8bit": 8, "nf4": 4}
SCALE_BYTES = 4
KEPT = ("router", "shared_gate")  # small matrices that stay as they are
SCALES = ".scales"  # ends the name of a matrix's scales


class QuantizedBaseError(TwinstreamError):
    """A base that cannot be kept in few bits."""


def quantized_layout(layout: FlatLayout, base: BaseFormat) -> FlatLayout:
    """Codes and scales in place of each matrix; a matrix keeps its name and shape.

    >>> from twinstream.models.layout import block_layout
    >>> from twinstream.models.presets import load_preset
    >>> whole = block_layout(load_preset("8b"))
    >>> round(16 * quantized_layout(whole, "nf4").size_bytes / whole.size_bytes, 2)
    4.5
    """
    tensors: list[InnerTensor] = []
    end_bytes = 0
    for inner in layout.tensors:
        for name, shape, size_bytes in _stored(inner, base):
            tensors.append(InnerTensor(name, shape, end_bytes, size_bytes))
            end_bytes = aligned(end_bytes + size_bytes)
    return FlatLayout(tuple(tensors), end_bytes)


def _stored(inner: InnerTensor, base: BaseFormat) -> list[tuple[str, tuple[int, ...], int]]:
    if base == "model" or len(inner.shape) < 2 or inner.name in KEPT:
        return [(inner.name, inner.shape, inner.size_bytes)]
    count = prod(inner.shape)
    num_scales = count // BLOCK_ELEMENTS[base]
    return [
        (inner.name, inner.shape, count * CODE_BITS[base] // 8),
        (f"{inner.name}{SCALES}", (num_scales,), num_scales * SCALE_BYTES),
    ]


def require_whole_blocks(spec: ModelSpec, base: str) -> None:
    """
    Raises:
        QuantizedBaseError: a projection has no whole number of the blocks of a format.
    """
    block = BLOCK_ELEMENTS[base]
    widths = {
        "Q": spec.d_q * spec.d_model, "K": spec.d_kv * spec.d_model,
    }  # fmt: skip
    for kind, _ in spec.layer_kinds:
        name = "gate" if kind.experts is None else "a shared expert's gate"
        widths[name] = dense_width(kind) * spec.d_model
    if spec.experts is not None:
        widths["an expert's gate"] = spec.experts.d_ff * spec.d_model
    for name, count in widths.items():
        if count % block:
            raise QuantizedBaseError(
                f"'{spec.name}' cannot have a base in {base}: {name}'s projection has {count:,} "
                f"elements, no whole number of the {block} that share a scale; use --base model"
            )
