"""Recipes with float32 gradients and with a float32 master, from chain to trained weights."""

import pytest
import torch

from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.runs import assert_same_bits, bits_of
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.state.training_state import initial_state
from twinstream.models.lowering.declarations import optimizer_parts
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps

FLOAT32 = Recipe(gradients="float32", optimizer_state="float32_master")
SPEC = small("tiny", dtype="bfloat16")


def master_of(state, group):
    """The float32 master of a group, out of its parts' m, v and master."""
    flat = state[f"opt.{group}"].view(torch.float32)
    parts = optimizer_parts(SPEC, group)
    return torch.cat(
        [
            flat[3 * part.element_offset :][2 * part.num_elements : 3 * part.num_elements]
            for part in parts
        ]
    )


def test_sizes_follow_the_recipe():
    chain = tiny_chain("packed", "tiny", FLOAT32, dtype="bfloat16")
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    for group in ("embedding", "0", "head"):
        assert sizes[f"grad.{group}"] == 2 * sizes[f"param.{group}"]
        assert sizes[f"opt.{group}"] == 6 * sizes[f"param.{group}"]
    adamw = next(call for name, call in chain.calls.items() if name.startswith("adamw.0"))
    # bf16 parameter written; float32 gradient read; m, v and master read and written
    assert adamw.cost[0].hbm_bytes == (2 + 4 + 6 * 4) * adamw.attributes["num_elements"]
    assert adamw.attributes["stochastic_rounding"] is False


@pytest.mark.parametrize("workload", ["packed", "sliced"])
def test_caps_change_no_bit(workload):
    chain = tiny_chain(workload, "tiny", FLOAT32, dtype="bfloat16")
    caps = Caps(device_bytes=enough_device_bytes(chain, "streaming"))
    expected = bits_of(planned(chain, MACHINE, Caps(), "resident"))
    assert_same_bits(bits_of(planned(chain, MACHINE, caps, "streaming"), poison=True), expected)


def test_parameters_are_the_masters_rounded_and_the_master_keeps_small_steps():
    chain = tiny_chain("one chunk", "tiny", FLOAT32, dtype="bfloat16")
    bits = bits_of(planned(chain, MACHINE, Caps(), "resident"))
    for group in ("embedding", "0", "1", "head"):
        parameters = bits.state[f"param.{group}"].view(torch.bfloat16)
        master = master_of(bits.state, group)
        assert torch.equal(parameters, master.bfloat16())
        assert not torch.equal(parameters.float(), master)


def test_a_fresh_master_is_the_parameters():
    state = initial_state(SPEC, 0, FLOAT32)
    for group in ("0", "embedding"):
        expected = state[f"param.{group}"].view(torch.bfloat16).float()
        assert torch.equal(master_of(state, group), expected)
    assert len(optimizer_parts(SPEC, "embedding")) > 1
