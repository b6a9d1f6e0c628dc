"""Frozen bases in few bits: codes, kernels, whole steps, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

import twinstream as ts
from twinstream.executor.kernels.base_codes import (
    dequantized_group,
    levels,
    quantize,
    quantized_group,
    write_dequantized,
)
from twinstream.executor.state.training_state import State, initial_state
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import block_layout
from twinstream.models.presets import load_preset
from twinstream.models.providers.trained import trained_groups
from twinstream.models.recipes.quantized_base import (
    BLOCK_ELEMENTS,
    CODE_BITS,
    BaseFormat,
    QuantizedBaseError,
)
from twinstream.models.recipes.recipe import Recipe

BASES: tuple[BaseFormat, ...] = ("8bit", "nf4")
# QLoRA, appendix E: quantiles of a normal distribution, 8 below zero, 7 above, and zero.
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=generator).to(dtype) * 0.02


def coded(values: torch.Tensor, base: BaseFormat) -> tuple[torch.Tensor, torch.Tensor]:
    count = values.numel()
    codes = torch.empty(count * CODE_BITS[base] // 8, dtype=torch.uint8)
    scales = torch.empty(count // BLOCK_ELEMENTS[base])
    quantize(values, codes, scales, base)
    return codes, scales


def decoded(
    codes: torch.Tensor, scales: torch.Tensor, base: BaseFormat, like: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(like)
    write_dequantized(codes, scales, out, levels(base, out.device))
    return out


@pytest.mark.parametrize("shape", [(64, 64), (48, 320), (1024, 1600)])
def test_codes_of_nf4_are_those_of_the_published_definition(shape: tuple[int, int]) -> None:
    """By numpy; beyond halfway between two levels, in float32, a value goes to the higher one."""
    values = matrix(shape)
    values[0, :64] = 0.0  # a block without a scale
    codes, scales = coded(values, "nf4")
    blocks = values.numpy().reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    table = np.array(PUBLISHED, dtype=np.float32)
    shares = blocks * (np.float32(1) / np.where(largest > 0, largest, np.float32(1)))[:, None]
    nearest = (shares[..., None] > (table[1:] + table[:-1]) / np.float32(2)).sum(-1)
    expected = nearest.reshape(-1, 2)
    assert np.array_equal(codes.numpy(), (expected[:, 0] << 4) | expected[:, 1])
    assert np.array_equal(scales.numpy(), largest)
    made = decoded(codes, scales, "nf4", values)
    assert np.array_equal(made.numpy().reshape(-1, 64), table[nearest] * largest[:, None])


def test_codes_of_nf4_are_those_of_bitsandbytes() -> None:
    bitsandbytes: Any = pytest.importorskip("bitsandbytes")
    values = matrix((256, 320))
    theirs, state = bitsandbytes.functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    codes, scales = coded(values, "nf4")
    assert torch.equal(codes, theirs.view(-1)) and torch.equal(scales, state.absmax)
    made = bitsandbytes.functional.dequantize_4bit(theirs, state)
    assert torch.equal(decoded(codes, scales, "nf4", values), made)


@pytest.mark.parametrize(("base", "worst"), [("8bit", 0.5 / 127), ("nf4", 0.16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_come_back_within_half_a_level(
    base: BaseFormat, worst: float, dtype: torch.dtype
) -> None:
    values = matrix((640, 1024), dtype)
    codes, scales = coded(values, base)
    made = decoded(codes, scales, base, values)
    off = (made.float() - values.float()).view(-1, BLOCK_ELEMENTS[base]).abs() / scales[:, None]
    assert off.max() <= worst + (0.004 if dtype == torch.bfloat16 else 1e-6)
    again = coded(made, base)[0] if dtype == torch.float32 else codes
    assert torch.equal(again, codes)


@pytest.mark.parametrize("base", BASES)
def test_what_is_not_finite_shows(base: BaseFormat) -> None:
    values = matrix((64, 64))
    values[3, 5] = float("nan")
    codes, scales = coded(values, base)
    made = decoded(codes, scales, base, values).view(-1, BLOCK_ELEMENTS[base])
    at = (3 * 64 + 5) // BLOCK_ELEMENTS[base]
    others = [block for block in range(len(made)) if block != at]
    assert not made[at].isfinite().any() and made[others].isfinite().all()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tritons_values_are_the_eager_ones(base: BaseFormat, dtype: torch.dtype) -> None:
    triton: Any = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton interprets where TRITON_INTERPRET=1 is set before it is imported")
    from twinstream.executor.kernels.triton_kernels import base_codes

    values = matrix((40, 192), dtype)
    codes, scales = coded(values, base)
    out = torch.empty_like(values)
    base_codes.write_dequantized(codes, scales, out, levels(base, out.device))
    assert torch.equal(out, decoded(codes, scales, base, values))


def recipe(base: BaseFormat, **more: Any) -> Recipe:
    return Recipe(lora=ts.lora_of("r=4"), base=base, **more)


def state_of(spec: ModelSpec, base: BaseFormat) -> tuple[State, State]:
    """In few bits, and of a base with the values that those stand for."""
    coded_state = initial_state(spec, seed=3, recipe=recipe(base))
    for name, flat in coded_state.items():
        if name.startswith("param.lora"):  # B is zero at first
            flat.view(getattr(torch, spec.dtype)).uniform_(-0.05, 0.05)
    whole = dict(coded_state)
    for layer in map(str, range(spec.num_layers)):
        dtype = getattr(torch, spec.dtype)
        flat = coded_state[f"param.{layer}"]
        whole[f"param.{layer}"] = dequantized_group(flat, block_layout(spec), dtype, base)
    return coded_state, whole


def run(spec: ModelSpec, how: Recipe, state: State, **caps: Any) -> Any:
    step = ts.TrainingStep(64, 128, 64, 1, recipe=how)
    policy = caps.pop("policy", "resident")
    schedule = ts.plan(spec, ts.load_machine("cpu"), step=step, policy=policy, **caps)
    assert not ts.verify(schedule)
    given = {name: flat.clone() for name, flat in state.items()}
    settings = ts.RunSettings(backend="cpu", num_steps=3, poison=True)
    return ts.execute(schedule, settings, state=given)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_is_that_of_the_values_that_the_codes_stand_for(
    base: BaseFormat, name: str, dtype: str
) -> None:
    """To the bit: the same products of the same matrices."""
    spec = load_preset(name).model_copy(update={"dtype": dtype})
    in_codes, whole = state_of(spec, base)
    found, expected = run(spec, recipe(base), in_codes), run(spec, recipe("model"), whole)
    assert found.losses == expected.losses
    trained = [key for key in found.state if ".lora." in key]
    assert trained and all(torch.equal(found.state[k], expected.state[k]) for k in trained)
    base_keys = [key for key in found.state if key.startswith("param.") and "lora" not in key]
    assert all(torch.equal(found.state[key], in_codes[key]) for key in base_keys)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("policy", "device"), [("streaming", 0.8), ("optimal", 0.75), ("full_recompute", 1.0)]
)
def test_no_policy_and_no_cap_changes_a_bit(base: BaseFormat, policy: str, device: float) -> None:
    spec = load_preset("tiny")
    in_codes, _ = state_of(spec, base)
    expected = run(spec, recipe(base), in_codes)
    step = ts.TrainingStep(64, 128, 64, 1, recipe=recipe(base))
    slots = ts.plan(spec, ts.load_machine("cpu"), step=step, policy="resident").slots
    ends = [slot.offset_bytes + slot.size_bytes for slot in slots if slot.tier.kind == "device"]
    cap = int(device * max(ends))
    found = run(spec, recipe(base), in_codes, policy=policy, device_mem=cap)
    assert found.losses == expected.losses
    assert all(torch.equal(found.state[key], expected.state[key]) for key in expected.state)


def test_only_what_is_frozen_is_in_few_bits() -> None:
    """Layer 0; the others train as ever."""
    spec, base = load_preset("tiny"), Recipe(frozen=("0",), base="nf4")
    state = initial_state(spec, 3, base)
    sizes = [state[f"param.{layer}"].numel() for layer in (0, 1)]
    assert sizes[0] < 0.33 * sizes[1]
    whole = initial_state(spec, 3, Recipe(frozen=("0",)))
    flat = dequantized_group(state["param.0"], block_layout(spec), torch.float32, "nf4")
    found = run(spec, base, state)
    expected = run(spec, Recipe(frozen=("0",)), whole | {"param.0": flat})
    assert found.losses == expected.losses
    assert torch.equal(found.state["param.1"], expected.state["param.1"])


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="only what is frozen can be kept in nf4"):
        Recipe(base="nf4")
    narrow = load_preset("tiny").model_copy(update={"d_model": 24, "d_ff": 30})
    with pytest.raises(QuantizedBaseError, match="gate's projection has 720 elements, no whole"):
        trained_groups(narrow, recipe("8bit"))
    flat = torch.zeros(block_layout(load_preset("tiny")).size_bytes, dtype=torch.uint8)
    made = quantized_group(flat, block_layout(load_preset("tiny")), torch.float32, "nf4")
    values = dequantized_group(made, block_layout(load_preset("tiny")), torch.float32, "nf4")
    assert not values.any()
