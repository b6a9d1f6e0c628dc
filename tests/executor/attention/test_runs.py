"""Whole steps with a library's attention: the recipe decides the bits, the plan does not."""

import pytest
import torch

from tests.helpers.plans import MACHINE, enough_device_bytes, planned, recompute_levels
from tests.helpers.runs import assert_same_bits, bits_of
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.kernels.attention.canary import AttentionCanaryError
from twinstream.executor.kernels.attention.registry import (
    AttentionNotAvailable,
    attention_implementation,
)
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE


def chain_with(attention: str, workload: str, dtype: str = "float32") -> Chain:
    recipe = Recipe(kernels=KernelChoice(attention=attention))
    return tiny_chain(workload, "tiny", recipe, dtype=dtype)


@pytest.mark.parametrize("workload", ["packed", "sliced", "unequal"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_and_recompute_change_no_bit(workload, dtype):
    chain = chain_with("sdpa_cpu", workload, dtype)
    resident = planned(chain, MACHINE, Caps(), "resident")
    expected = bits_of(resident)
    streaming = Caps(device_bytes=enough_device_bytes(chain, "streaming"))
    assert_same_bits(bits_of(planned(chain, MACHINE, streaming, "streaming")), expected)
    cap = arena_bytes(resident, DEVICE) + resident.caps.outside_arena_bytes - 1
    recomputing = planned(chain, MACHINE, Caps(device_bytes=cap), "resident")
    assert recompute_levels(recomputing)
    assert_same_bits(bits_of(recomputing, poison=True), expected)


@pytest.mark.parametrize("workload", ["packed", "sliced", "sliced in pairs", "unequal"])
def test_one_step_moves_weights_as_eager_attention_does(workload):
    """Sums in another order: losses to 1e-5; a first AdamW step is the sign of the gradient."""
    found, expected = (
        bits_of(planned(chain_with(name, workload), MACHINE, Caps(), "resident"), num_steps=1)
        for name in ("sdpa_cpu", "eager")
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.losses != (0.0,)
    for name in ("param.0", "param.1", "param.head"):
        ours, eager = (bits.state[name].view(torch.float32) for bits in (found, expected))
        assert ((ours - eager).abs() < 1e-4).float().mean() > 0.99


def test_a_run_whose_attention_gives_nan_stops_before_it_begins(monkeypatch):
    tried = attention_implementation("sdpa_cpu")
    right = tried.forward

    def faulty(inputs, result, workspace):
        right(inputs, result, workspace)
        result.out[0, 0, 0, 0] = float("nan")

    schedule = planned(chain_with("sdpa_cpu", "packed"), MACHINE, Caps(), "resident")
    monkeypatch.setattr(tried, "forward", faulty)
    with pytest.raises(AttentionCanaryError, match="NaN or infinity in output"):
        bits_of(schedule)


def test_a_run_is_refused_before_it_begins_where_its_attention_cannot_run():
    schedule = planned(chain_with("flash4", "packed", "bfloat16"), MACHINE, Caps(), "resident")
    with pytest.raises(AttentionNotAvailable, match="'flash4' cannot run here"):
        bits_of(schedule)
