"""AdamW on one flat tensor, or on a part of it.

Only operations that round each element by itself, so that any split into parts and blocks gives
the same bits (a fused multiply-add, as in lerp or addcmul, may be used for some elements only).
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.random_bits import random_words, stream_keys
from twinstream.executor.kernels.row_blocks import float32_copy
from twinstream.models.workspace import Attributes, typed_attribute

# A float32 temporary is 1 MiB, one of random numbers 2 MiB; no more than ten are alive.
_BLOCK_ELEMENTS = 2**18


def adamw_step(operands: Operands, attributes: Attributes) -> None:
    """Update parameters, m and v; with stochastic rounding each is rounded by its own bits.

    Math is float32, as torch.optim.AdamW does it. Learning rate, bias corrections, step and seed
    come from `step_state`, on the device.
    """
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_elements = typed_attribute(attributes, "num_elements", int)
    hyper = _Hyper.of(operands["step_state"].bytes, attributes)
    state = operands["state"].view(dtype, (2, num_elements))
    flats = _Flats(
        parameter=operands["parameters"].view(dtype, (num_elements,)),
        gradient=operands["gradients"].view(dtype, (num_elements,)),
        m=state[0],
        v=state[1],
    )
    for start in range(0, num_elements, _BLOCK_ELEMENTS):
        _update(flats, slice(start, min(start + _BLOCK_ELEMENTS, num_elements)), hyper)


@dataclass(frozen=True)
class _Hyper:
    lr: torch.Tensor
    m_correction: torch.Tensor
    v_correction_sqrt: torch.Tensor
    decay: torch.Tensor
    beta1: float
    beta2: float
    eps: float
    element_offset: int
    keys: tuple[tuple[torch.Tensor, ...], ...] | None  # two random streams, or none

    @classmethod
    def of(cls, step_state: torch.Tensor, attributes: Attributes) -> "_Hyper":
        lr, m_correction, v_correction = step_state[:12].view(torch.float32).unbind()
        step, seed = step_state[16:32].view(torch.int64).unbind()
        keys = None
        if typed_attribute(attributes, "stochastic_rounding", bool):
            first = 2 * typed_attribute(attributes, "tensor_seed", int)
            keys = tuple(stream_keys(seed, step, stream) for stream in (first, first + 1))
        return cls(
            lr=lr,
            m_correction=m_correction,
            v_correction_sqrt=v_correction.sqrt(),
            decay=1.0 - lr * typed_attribute(attributes, "weight_decay", float),
            beta1=typed_attribute(attributes, "beta1", float),
            beta2=typed_attribute(attributes, "beta2", float),
            eps=typed_attribute(attributes, "eps", float),
            element_offset=typed_attribute(attributes, "element_offset", int),
            keys=keys,
        )


@dataclass(frozen=True)
class _Flats:
    parameter: torch.Tensor
    gradient: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


def _update(flats: _Flats, block: slice, hyper: _Hyper) -> None:
    gradient = float32_copy(flats.gradient[block])
    m = float32_copy(flats.m[block]).mul_(hyper.beta1).add_(gradient * (1.0 - hyper.beta1))
    v = float32_copy(flats.v[block]).mul_(hyper.beta2)
    v.add_(gradient.mul_(gradient).mul_(1.0 - hyper.beta2))
    denominator = v.sqrt().div_(hyper.v_correction_sqrt).add_(hyper.eps)
    change = (m / hyper.m_correction).mul_(hyper.lr).div_(denominator)
    parameter = float32_copy(flats.parameter[block]).mul_(hyper.decay).sub_(change)
    del gradient, denominator, change
    if hyper.keys is None:
        for flat, value in ((flats.parameter, parameter), (flats.m, m), (flats.v, v)):
            flat[block].copy_(value)
        return
    start = hyper.element_offset + block.start
    indices = torch.arange(start, start + m.numel(), device=m.device)
    words = random_words(hyper.keys[0], indices)
    flats.parameter[block].copy_(_rounded_down_or_up(parameter, words & 0xFFFF))
    flats.m[block].copy_(_rounded_down_or_up(m, words >> 16))
    words = random_words(hyper.keys[1], indices)
    flats.v[block].copy_(_rounded_down_or_up(v, words & 0xFFFF))


def _rounded_down_or_up(x: torch.Tensor, random_16: torch.Tensor) -> torch.Tensor:
    """Round float32 to a bf16 value, to either neighbour with a chance that keeps the mean.

    Values that are bf16 already stay. Infinities and NaN stay; what is finite stays so.
    """
    limit = torch.finfo(torch.bfloat16).max
    bits = x.clamp(-limit, limit).view(torch.int32)
    bits.add_(random_16.to(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(x.isfinite(), bits.view(torch.float32), x)
