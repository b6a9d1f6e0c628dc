"""A base in few bits on a GPU: Triton's values and whole steps."""

from typing import Any

import pytest
import torch

import twinstream as ts
from tests.executor.test_quantized_base import BASES, coded, decoded, matrix, recipe, state_of
from twinstream.executor.kernels.base_codes import levels
from twinstream.models.presets import load_preset
from twinstream.models.recipes.quantized_base import BaseFormat
from twinstream.models.recipes.recipe import KernelChoice

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_cpu(base: BaseFormat, dtype: torch.dtype) -> None:
    from twinstream.executor.kernels.triton_kernels import base_codes

    values = matrix((1000, 1088), dtype)
    codes, scales = coded(values, base)
    out = torch.empty_like(values, device="cuda")
    table = levels(base, out.device)
    base_codes.write_dequantized(codes.cuda(), scales.cuda(), out, table)
    assert torch.equal(out.cpu(), decoded(codes, scales, base, values))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_no_policy_changes_a_bit(base: BaseFormat, graphs: str) -> None:
    spec = load_preset("tiny").model_copy(update={"dtype": "bfloat16"})
    state, _ = state_of(spec, base)
    how = recipe(base, kernels=KernelChoice(vector="triton", attention="sdpa_flash"))
    step = ts.TrainingStep(64, 128, 64, 1, recipe=how)
    found: list[Any] = []
    for policy in ("resident", "streaming"):
        schedule = ts.plan(spec, ts.load_machine("h200"), step=step, policy=policy)
        settings = ts.RunSettings(backend="cuda", num_steps=3, graphs=graphs)
        given = {name: flat.clone() for name, flat in state.items()}
        found.append(ts.execute(schedule, settings, state=given))
    assert found[0].losses == found[1].losses
    assert all(torch.equal(found[0].state[key], found[1].state[key]) for key in state)
