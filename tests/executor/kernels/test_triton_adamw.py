"""Triton's AdamW against its eager twin: no fused multiply-adds, the same random bits.

m and v have the same bits. The parameter's update takes a square root, which torch does not round
correctly on CPUs (MKL) and Triton does, so that a float32 parameter may be off by a last bit; of
bf16 ones none of those here is.
"""

import importlib
import math
from dataclasses import replace

import pytest
import torch

from tests.executor.kernels.test_adamw import step_state
from tests.executor.kernels.twins import DTYPES, assert_twins_agree, on, randn
from twinstream.executor.kernels.codes import encode
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.updates import AdamwConstants, FlatUpdate

pytest.importorskip("triton")
triton_adamw = importlib.import_module("twinstream.executor.kernels.triton_kernels.adamw")

DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
CONSTANTS = AdamwConstants(0.9, 0.999, 1e-8)
CLOSE = {"tolerances": {torch.float32: 2.0**-23, torch.bfloat16: 0.0}, "exact": ("m", "v")}


def state_of(count, dtype, *, gradient_dtype=None, master=False):
    state_dtype = torch.float32 if master else dtype
    m, v = (randn(count, dtype=state_dtype, seed=seed) for seed in (2, 3))
    return FlatUpdate(
        parameter=randn(count, dtype=dtype),
        gradient=randn(count, dtype=gradient_dtype or dtype, seed=1),
        states=(m, v.abs()),
        step=StepState(step_state(lr=0.05, step=9, seed=2**40 + 7)),
        master=randn(count) if master else None,
    )


def call(ops, workspace, state):
    ops.adamw(state, CONSTANTS)


def coded_state_of(count, dtype):
    """Codes of values of all sizes, the last block not full."""
    state, blocks = state_of(count, dtype), -(-count // 256)
    scales = (torch.empty(blocks), torch.empty(blocks))
    m, v = (torch.empty(count, dtype=torch.uint8) for _ in range(2))
    encode(state.states[0].float() ** 3, m, scales[0], None, signed=True)
    encode(state.states[1].float() ** 6, v, scales[1], None, signed=False)
    return replace(state, states=(m, v), scales=scales)


def results(state):
    found = {"parameter": state.parameter, "m": state.states[0], "v": state.states[1]}
    if state.scales is not None:
        found |= dict(zip(("m scale", "v scale"), state.scales, strict=True))
    return found | ({} if state.master is None else {"master": state.master})


@DTYPE
@pytest.mark.parametrize("count", [1, 1000, 2049])
def test_rounding_to_nearest(triton_device, dtype, count):
    state = state_of(count, dtype)
    assert_twins_agree(triton_device, call, state, results=results, **CLOSE)


@pytest.mark.parametrize("offset", [0, 12345, 2**32 - 700, 2**32 + 5])
@pytest.mark.parametrize("stream", [0, 2**33 - 2])
def test_stochastic_rounding_draws_the_same_bits(triton_device, offset, stream):
    state = replace(state_of(1500, torch.bfloat16), stream=stream, element_offset=offset)
    assert_twins_agree(triton_device, call, state, results=results, **CLOSE)


@DTYPE
@pytest.mark.parametrize("gradient_dtype", DTYPES.values(), ids=DTYPES)
def test_float32_master(triton_device, dtype, gradient_dtype):
    state = state_of(1100, dtype, gradient_dtype=gradient_dtype, master=True)
    assert_twins_agree(triton_device, call, state, results=results, **CLOSE)


@DTYPE
@pytest.mark.parametrize(
    "ranges",
    [((0, 5),), ((3, 1030), (1090, 1100)), ((0, 1), (1, 2), (1024, 1025)),
     ((0, 5), (1030, 1040)), ((1, 2), (5, 6), (1090, 1099))],
    ids=str,
)  # fmt: skip
def test_what_has_no_decay_has_none(triton_device, dtype, ranges):
    state = replace(state_of(1100, dtype), undecayed=ranges)
    assert_twins_agree(triton_device, call, state, results=results, **CLOSE)


@DTYPE
@pytest.mark.parametrize(
    ("max_norm", "norm"), [(1.0, 3.7), (1.0, 0.2), (0.0, 3.7), (math.inf, 9.0)]
)
def test_clipping(triton_device, dtype, max_norm, norm):
    clipped = step_state(lr=0.05, step=9, max_norm=max_norm)
    state = replace(state_of(1100, dtype), step=StepState(clipped), norm=torch.tensor([norm]))
    assert_twins_agree(triton_device, call, state, results=results, **CLOSE)


@DTYPE
@pytest.mark.parametrize("stream", [None, 6])
@pytest.mark.parametrize("count", [1, 300, 1024, 2500])
def test_8_bit_codes(triton_device, dtype, stream, count):
    state = replace(coded_state_of(count, dtype), stream=stream, element_offset=512)
    exact = ("m", "v", "m scale", "v scale")
    tolerances = {**CLOSE["tolerances"], torch.uint8: 0.0}
    assert_twins_agree(
        triton_device, call, state, results=results, tolerances=tolerances, exact=exact
    )


def test_programs_that_take_several_blocks_change_no_bit(triton_device, monkeypatch):
    monkeypatch.setattr(triton_adamw, "_BLOCK", 128)
    monkeypatch.setattr(triton_adamw, "_PROGRAMS", 3)
    state = replace(state_of(1000, torch.bfloat16), stream=4)
    assert_twins_agree(triton_device, call, state, results=results, **CLOSE)


def test_not_finite_stays_and_finite_stays_finite(triton_device):
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), largest, -largest, 0.0])
    state = state_of(6, torch.bfloat16)
    state.parameter.copy_(values)
    for flat in (state.gradient, *state.states):
        flat.zero_()
    grows = StepState(step_state(lr=1.0, weight_decay=-0.003))
    triton_state = on(triton_device, replace(state, step=grows, stream=4))
    triton_adamw.adamw(triton_state, CONSTANTS)
    after = triton_state.parameter.float().cpu()
    assert after[:2].tolist() == values[:2].tolist()
    assert after[2].isnan()
    assert after[3:].tolist() == [largest, -largest, 0.0]


@DTYPE
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("make", [state_of, coded_state_of])
def test_an_update_that_may_be_skipped(triton_device, dtype, skips, make):
    """What is skipped keeps the bits of what was there; what is not is as ever."""
    step = StepState(step_state(lr=0.05, step=9, skips=skips))
    state = replace(make(1100, dtype), step=step, norm=torch.tensor([3.0]))
    if skips:
        state.gradient.fill_(math.nan)
    before = {name: flat.clone() for name, flat in results(state).items()}
    stream = 6 if dtype == torch.bfloat16 else None
    state = replace(state, skips=step.skips, stream=stream)
    tolerances = {**CLOSE["tolerances"], torch.uint8: 0.0}
    assert_twins_agree(
        triton_device, call, state, results=results, tolerances=tolerances, exact=("m", "v"),
    )  # fmt: skip
    if skips:
        on_device = on(triton_device, state)
        triton_adamw.adamw(on_device, CONSTANTS)
        for name, flat in results(on_device).items():
            assert torch.equal(flat.cpu(), before[name]), name
