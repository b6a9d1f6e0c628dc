"""State in shards: what each replica's schedule has, and whole again."""

import pytest
import torch

from twinstream.executor.state.sharded_state import ShardedState
from twinstream.executor.state.training_state import initial_state
from twinstream.models.kernel_costs.scratch_sizes import state_bytes
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe

SPEC = load_preset("tiny").model_copy(update={"dtype": "bfloat16"})


@pytest.mark.parametrize("num_shards", [2, 3, 5])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("kind", ["model", "float32_master", "8bit"])
def test_shards_put_together_are_the_state(kind, zero, num_shards):
    recipe = Recipe(optimizer_state=kind, clips=zero == 3)
    fresh = initial_state(SPEC, 1, recipe)
    generator = torch.Generator().manual_seed(2)
    state = {
        name: torch.randint(256, flat.shape, generator=generator, dtype=torch.uint8)
        for name, flat in fresh.items()
    }
    cut = ShardedState(SPEC, recipe, Layout(zero=zero, dp=num_shards))
    shards = [cut.shard(state, index) for index in range(num_shards)]
    again = cut.whole(shards)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], flat) for name, flat in state.items())


def test_a_shard_has_the_moments_of_its_own_parameters():
    recipe = Recipe(optimizer_state="float32_master")
    cut = ShardedState(SPEC, recipe, Layout(zero=3, dp=3))
    state = initial_state(SPEC, 1, recipe)
    for index in range(3):
        shard = cut.shard(state, index)
        parameters = shard["param.head"].view(torch.bfloat16)
        count = parameters.numel()
        assert shard["opt.head"].numel() == state_bytes("float32_master", "bfloat16", count)
        m, v, master = shard["opt.head"].view(torch.float32).view(3, count)
        assert not m.any()
        assert not v.any()
        assert torch.equal(master, parameters.float())
