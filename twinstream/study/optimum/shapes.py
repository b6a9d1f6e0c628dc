"""A decoder of about so many parameters: its depth and widths."""

from math import log
from typing import Any, Literal

from twinstream.models.spec import ModelSpec
from twinstream.study.answer import StudyError

Shape = Literal["llama", "gpt"]
_ASPECT = 128  # d_model over layers: 8B, 70B and 405B of Llama 3 have 128, 102, 130
_HEAD = 128
_WIDTH = 8 * _HEAD  # heads divide among the 8 GPUs of a node
_DEPTH = 4  # layers divide among stages
_MOST_LAYERS = 400
_OF_ASPECT = 0.03  # of the size, that a factor e of the aspect is worth
_KIND: dict[Shape, dict[str, Any]] = {
    "llama": {"vocab_size": 128256},
    "gpt": {"vocab_size": 51200, "mlp": "gelu", "norm": "layer", "biases": True,
            "positions": "learned", "tied_embeddings": True},
}  # fmt: skip


def spec_near(params: float, shape: Shape, seq_len: int) -> ModelSpec:
    """The model of this shape whose parameters are nearest to a number.

    `llama` has gated layers of 3.5 times the width, 8 heads of keys and values, and Llama 3's
    vocabulary; `gpt` those of Megatron's models of 2021.

    >>> spec_near(8e9, "llama", 8192).num_layers
    32

    Raises:
        StudyError: no model of the shape has so few or so many.
    """
    least, most = _spec(_WIDTH, _DEPTH, shape, seq_len), None
    width = least.d_model
    while (wide := _spec(width, _depth(width), shape, seq_len)).num_parameters < params:
        most, width = wide, width + _WIDTH
        if wide.num_layers > _MOST_LAYERS:
            raise StudyError(f"{params:.3g} parameters are more than a model of this shape has")
    candidates = [
        _spec(each, depth, shape, seq_len)
        for each in {width, most.d_model if most else width}
        for depth in _depths(each, params, shape, seq_len)
    ]
    best = min(candidates, key=lambda spec: _distance(spec, params))
    if params < least.num_parameters / 2:
        raise StudyError(
            f"{params:.3g} parameters are fewer than the {least.num_parameters:.3g} of the least "
            "model of this shape: give more days, FLOPs or money, or a model with --model"
        )
    return best


def _distance(spec: ModelSpec, params: float) -> float:
    """From the size that is asked for, and a little from the usual aspect."""
    aspect = spec.d_model / spec.num_layers / _ASPECT
    return abs(spec.num_parameters / params - 1) + _OF_ASPECT * abs(log(aspect))


def _depth(width: int) -> int:
    return max(_DEPTH, round(width / _ASPECT / _DEPTH) * _DEPTH)


def _depths(width: int, params: float, shape: Shape, seq_len: int) -> list[int]:
    """Depths around the one that gives this width so many parameters."""
    one = _spec(width, _DEPTH, shape, seq_len).num_parameters
    layer = (_spec(width, 2 * _DEPTH, shape, seq_len).num_parameters - one) / _DEPTH
    depth = int((params - one) / layer / _DEPTH + 1) * _DEPTH
    return [each for each in (depth, depth + _DEPTH) if each >= _DEPTH] or [_DEPTH]


def _spec(width: int, depth: int, shape: Shape, seq_len: int) -> ModelSpec:
    heads, gated = width // _HEAD, shape == "llama"
    return ModelSpec(
        name=f"{shape} {depth} x {width:,}", num_layers=depth, d_model=width, num_heads=heads,
        num_kv_heads=8 if gated else heads, head_dim=_HEAD,
        d_ff=7 * width // 2 if gated else 4 * width,
        max_positions=0 if gated else seq_len, **_KIND[shape],
    )  # fmt: skip
