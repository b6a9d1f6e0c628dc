import math
from itertools import pairwise

import pytest
import torch

from tests.executor.kernels.driver import run
from twinstream.executor.kernels.step_state import StepState, packed_step_state
from twinstream.executor.kernels.vector.rounding import random_16, random_words, stream_keys
from twinstream.models.kernel_costs import scratch_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK_AND_MORE = 2**18 + 1000


def step_state(lr=0.0, step=1, seed=7, weight_decay=0.1, max_norm=0.0, skips=False):
    """As the training loop fills it."""
    betas = 0.9, 0.999
    packed = packed_step_state(
        learning_rate=lr, corrections=(1 - betas[0] ** step, 1 - betas[1] ** step),
        weight_decay=weight_decay, step=step, seed=seed, loss_scale=float("nan"), max_norm=max_norm,
        skips=skips,
    )  # fmt: skip
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def adamw(flats, state, norm=None, **changes):
    """Update parameter, m and v of (parameter, gradient, m, v) in place."""
    parameter, gradient, m, v = flats
    both = torch.cat((m, v))
    attributes = {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "num_elements": parameter.numel(),
        "element_offset": 0,
        "tensor_seed": 3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "stochastic_rounding": parameter.dtype == torch.bfloat16,
    }
    operands = {
        "parameters": (parameter.view(torch.uint8), "update"),
        "gradients": (gradient.view(torch.uint8), "read"),
        "state": (both.view(torch.uint8), "update"),
        "step_state": (state, "read"),
    }
    if norm is not None:
        operands["norm"] = (torch.tensor([norm]).view(torch.uint8), "read")
    run("adamw_step", attributes | changes, operands)
    m.copy_(both[: m.numel()])
    v.copy_(both[m.numel() :])


def randn(count, dtype=torch.float32, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_norms_and_biases_have_no_decay():
    """Ranges that begin, end or lie across the blocks of the update."""
    count = 2**18 + 300
    ranges = ((0, 7), (100, 101), (2**18 - 5, 2**18 + 9), (2**18 + 299, 2**18 + 300))
    parameter, zeros = randn(count), torch.zeros(count)
    before = parameter.clone()
    undecayed = tuple(end for pair in ranges for end in pair)
    state = step_state(lr=1.0, weight_decay=0.5)
    adamw((parameter, zeros.clone(), zeros.clone(), zeros.clone()), state, undecayed=undecayed)
    expected = before * 0.5
    for start, end in ranges:
        expected[start:end] = before[start:end]
    assert torch.equal(parameter, expected)


def test_float32_agrees_with_torch():
    parameter = randn(1000)
    m, v = torch.zeros(1000), torch.zeros(1000)
    reference = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([reference], lr=0.01, weight_decay=0.1, foreach=False)
    for step in range(1, 21):
        gradient = randn(1000, seed=step) * 10.0 ** (step % 5 - 3)
        state = step_state(lr=0.01, step=step)
        adamw((parameter, gradient, m, v), state)
        reference.grad = gradient
        optimizer.step()
        assert (parameter - reference).abs().max() <= 2e-6 * reference.abs().max()
    expected = optimizer.state[reference]
    assert (m - expected["exp_avg"]).abs().max() <= 1e-6 * m.abs().max()
    assert (v - expected["exp_avg_sq"]).abs().max() <= 1e-6 * v.abs().max()


@pytest.mark.parametrize(
    ("max_norm", "norm", "scale"),
    [(0.5, 2.0, 0.5 / (2.0 + 1e-6)), (2.0, 0.5, 1.0), (0.0, 2.0, 1.0), (math.inf, 2.0, 1.0)],
)
def test_a_gradient_is_scaled_where_the_norm_of_all_is_too_large(max_norm, norm, scale):
    """Eagerly as by torch.nn.utils.clip_grad_norm_; with the scale 1 to the bit."""
    flats = [randn(1000, seed=seed) for seed in range(3)] + [randn(1000, seed=3).abs()]
    expected = [flat.clone() for flat in flats]
    expected[1] *= scale
    adamw(expected, step_state(lr=0.05, step=4))
    adamw(flats, step_state(lr=0.05, step=4, max_norm=max_norm), norm)
    for flat, value in zip((flats[0], *flats[2:]), (expected[0], *expected[2:]), strict=True):
        assert torch.equal(flat, value) if scale == 1.0 else torch.allclose(flat, value, rtol=1e-6)


@pytest.mark.parametrize("max_norm", [1.0, 1e30])
def test_a_norm_that_is_no_number_makes_all_of_it_so(max_norm):
    flats = [randn(10, seed=seed) for seed in range(3)] + [randn(10, seed=3).abs()]
    adamw(flats, step_state(lr=0.05, max_norm=max_norm), math.nan)
    assert all(flat.isnan().all() for flat in (flats[0], *flats[2:]))


@pytest.mark.parametrize("rounding", [False, True])
def test_bfloat16_is_float32_rounded(rounding):
    """Nearest is off by half a unit (2**-8 of the value) at most, stochastic by a whole one."""
    flats = [randn(5000, torch.bfloat16, seed) for seed in range(3)]
    flats.append(randn(5000, torch.bfloat16, 3).abs())
    exact = [flat.float() for flat in flats]
    adamw(exact, step_state(lr=0.05, step=4))
    adamw(flats, step_state(lr=0.05, step=4), stochastic_rounding=rounding)
    for flat, value in zip(flats, exact, strict=True):
        assert ((flat - value).abs() <= 2.0 ** (-7 if rounding else -8) * value.abs()).all()
        if not rounding:
            assert torch.equal(flat, value.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(0, 1, 778, 4096, 5001), (0, 131, BLOCK_AND_MORE)])
def test_any_split_into_parts_gives_the_same_bits(dtype, bounds):
    whole = [randn(bounds[-1], DTYPES[dtype], seed) for seed in range(4)]
    whole[3] = whole[3].abs()
    parts = [flat.clone() for flat in whole]
    state = step_state(lr=0.05, step=9)
    adamw(whole, state)
    for start, stop in pairwise(bounds):
        part = [flat[start:stop] for flat in parts]
        adamw(part, state, element_offset=start)
    for left, right in zip(whole, parts, strict=True):
        assert torch.equal(left, right)


def rounded_up(count, state, what="parameter", **changes):
    """Which elements, all of them 1 before, take the upper neighbour of their new value."""
    names = ("parameter", "gradient", "m", "v")
    flats = {name: torch.zeros(count, dtype=torch.bfloat16) for name in names}
    flats[what].fill_(1.0)
    adamw(flats.values(), state, **changes)
    return flats[what] == flats[what].max()


def test_stochastic_rounding_keeps_the_mean():
    count = 2**17
    state = step_state(lr=2.0**-10, weight_decay=1.0)
    up = {what: rounded_up(count, state, what) for what in ("parameter", "m", "v")}
    # Chances: 1 - 2**-10 lies 1/4 of 2**-8 below 1; 0.9 between 0.8984375 and 0.90234375;
    # 0.999 lies 0.001 of 2**-8 below 1.
    chances = {"parameter": 0.75, "m": (0.9 - 0.8984375) * 256, "v": 1 - 0.001 * 256}
    for what, chance in chances.items():
        sigma = math.sqrt(chance * (1 - chance) / count)
        assert abs(up[what].double().mean() - chance) <= 4 * sigma


def test_random_streams_are_independent_of_each_other():
    """Two independent events of chance 3/4 coincide with chance 5/8."""
    count = 2**16
    lr = 2.0**-10
    state = step_state(lr, weight_decay=1.0)
    base = rounded_up(count, state)
    others = {
        "step": rounded_up(count, step_state(lr, step=2, weight_decay=1.0)),
        "seed": rounded_up(count, step_state(lr, seed=8, weight_decay=1.0)),
        "high word of the seed": rounded_up(
            count, step_state(lr, seed=7 + 2**32, weight_decay=1.0)
        ),
        "tensor": rounded_up(count, state, tensor_seed=4),
        "next elements": rounded_up(count, state, element_offset=count),
        "elements 2**32 later": rounded_up(count, state, element_offset=2**32),
        "neighbour": base.roll(1),
    }
    sigma = math.sqrt(5 / 8 * 3 / 8 / count)
    for name, other in others.items():
        assert abs((base == other).double().mean() - 5 / 8) <= 4 * sigma, name
    assert torch.equal(base, rounded_up(count, state))


@pytest.mark.parametrize("seed", [7, 2**40 + 1])
def test_the_bits_of_three_roundings_are_uniform_and_pairwise_independent(seed):
    """Chi square of 256 cells, 255 +- 22.6; of pairs, of the cells of both; correlations."""
    count, like = 2**18, torch.empty(2**18)
    fields = random_16(stream_keys(StepState(step_state(seed=seed)), 3), 5, like)
    cells = [(field >> 8) for field in fields] + [field & 0xFF for field in fields]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        cells.append((fields[one] >> 12) * 16 + (fields[other] >> 12))
        cells.append(fields[one] % 16 * 16 + fields[other] % 16)
        both = torch.stack([fields[one], fields[other]]).double()
        assert abs(torch.corrcoef(both)[0, 1]) < 4 / count**0.5
    expected = count / 256
    for cell in cells:
        squares = (torch.bincount(cell, minlength=256) - expected).double() ** 2 / expected
        assert abs(float(squares.sum()) - 255) < 4 * math.sqrt(2 * 255)
    for field in fields:
        next_to = torch.stack([field[:-1], field[1:]]).double()
        assert abs(torch.corrcoef(next_to)[0, 1]) < 4 / count**0.5


def test_words_are_those_of_their_index_across_the_end_of_its_low_half():
    keys = torch.tensor(2**32 - 5), torch.tensor(2**31 + 9)
    words = random_words(keys, 2**32 - 3, torch.empty(6))
    first = [random_words(keys, 2**32 - 3 + at, torch.empty(1)) for at in range(6)]
    assert torch.equal(words, torch.cat(first))


def test_not_finite_stays_and_finite_stays_finite():
    largest = torch.finfo(torch.bfloat16).max
    values = [float("inf"), -float("inf"), float("nan"), largest, -largest, 0.0, -0.0, 1e-40]
    parameter = torch.tensor(values * 500).bfloat16()
    gradient, m, v = (torch.zeros_like(parameter) for _ in range(3))
    before = parameter.clone()
    adamw((parameter, gradient, m, v), step_state())
    same = (parameter == before) | (parameter.isnan() & before.isnan())
    assert same.all()
    # Pushed beyond the largest bf16, but not beyond the largest float32.
    parameter.fill_(largest)
    adamw((parameter, gradient, m, v), step_state(lr=1.0, weight_decay=-0.003))
    assert (parameter == largest).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", ["model", "float32_master", "8bit"])
def test_an_update_that_is_skipped_changes_no_bit_whatever_the_gradients_are(dtype, kind):
    """Every byte of the state is drawn, those of the gradients and of the norm say NaN."""
    count = BLOCK_AND_MORE
    state_bytes = scratch_sizes.state_bytes(kind, str(dtype).removeprefix("torch."), count)
    generator = torch.Generator().manual_seed(1)
    parameter, state = (
        torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for size in (count * dtype.itemsize, state_bytes)
    )
    attributes = {
        "dtype": str(dtype).removeprefix("torch."), "num_elements": count, "element_offset": 0,
        "tensor_seed": 3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "may_skip": True,
        "stochastic_rounding": dtype == torch.bfloat16, "optimizer_state": kind,
    }  # fmt: skip
    before = parameter.clone(), state.clone()
    for skips in (True, False):
        operands = {
            "parameters": (parameter, "update"),
            "gradients": (torch.full((count,), math.nan, dtype=dtype).view(torch.uint8), "read"),
            "state": (state, "update"),
            "step_state": (step_state(lr=math.nan, skips=skips), "read"),
            "norm": (torch.tensor([math.nan]).view(torch.uint8), "read"),
        }
        run("adamw_step", attributes, operands)
        same = torch.equal(parameter, before[0]), torch.equal(state, before[1])
        assert same == ((True, True) if skips else (False, False))


def updated(rule, gradient, norm=None, **told):
    """Parameter and state after a step of another rule, in float32."""
    count, of_matrix = gradient.numel(), 16 * 12
    attributes = {
        "dtype": "float32", "num_elements": count, "element_offset": 0, "tensor_seed": 3,
        "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "stochastic_rounding": False, "may_skip": True,
        "rule": rule, "num_states": 1, "matrices": (5, 16, 12),
    }  # fmt: skip
    size = 2 * count - of_matrix if rule == "muon" else count
    parameter, state = randn(count, seed=1), randn(size, seed=2).abs()
    operands = {
        "parameters": (parameter.view(torch.uint8), "update"),
        "gradients": (gradient.clone().view(torch.uint8), "read"),
        "state": (state.view(torch.uint8), "update"),
        "step_state": (step_state(lr=0.05, **told), "read"),
    }
    if norm is not None:
        operands["norm"] = (torch.tensor([norm]).view(torch.uint8), "read")
    run("muon_step" if rule == "muon" else "element_step", attributes, operands)
    return torch.cat([parameter, state])


@pytest.mark.parametrize("rule", ["sgd", "lion", "muon"])
def test_other_rules_clip_and_skip_as_adamw_does(rule):
    gradient = randn(5 + 16 * 12 + 40, seed=3)
    scaled = gradient * (torch.tensor(1.0) / (torch.tensor(4.0) + 1e-6))
    clipped = updated(rule, gradient, norm=4.0, max_norm=1.0)
    assert torch.equal(clipped, updated(rule, scaled))
    if rule != "lion":  # which takes signs alone
        assert not torch.equal(clipped, updated(rule, gradient))
    skipped = updated(rule, torch.full_like(gradient, math.nan), skips=True)
    count = gradient.numel()
    before = [randn(count, seed=1), randn(skipped.numel() - count, seed=2).abs()]
    assert torch.equal(skipped, torch.cat(before))
