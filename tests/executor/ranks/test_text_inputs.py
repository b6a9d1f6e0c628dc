"""What ranks on text begin with: together the weights and the text of one device."""

from typing import Any

import numpy as np
import torch

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.clusters.running.run_ranks import TextInputs
from twinstream.data.text import TextBatches
from twinstream.executor.ranks.rank_run import RankInputs
from twinstream.executor.state.sharded_state import ShardedState
from twinstream.executor.state.training_state import initial_state
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import RankPart, rank_part

SPEC = small("tiny", num_layers=4)
WORKLOAD = WORKLOADS["packed"].model_copy(update={"rounds_per_step": 2})
TEXT = np.random.default_rng(1).integers(0, SPEC.vocab_size, 5000, dtype=np.int32)


def made(**fields: Any) -> list[tuple[RankPart, RankInputs]]:
    layout = Layout(**fields)
    schedule = plan_pipeline(Job.of_step(SPEC, WORKLOAD, Recipe(), layout), MACHINE)
    parts = [rank_part(schedule, rank) for rank in range(schedule.mesh.size)]
    inputs = TextInputs(SPEC, layout, TEXT, 1e-3, seed=3)
    return [(part, inputs(part)) for part in parts]


def test_replicas_share_out_the_text_of_one_device():
    whole = WORKLOAD.model_copy(update={"rounds_per_step": 4})
    batches, each = TextBatches(TEXT, whole), WORKLOAD.chunks_per_round * 2
    for part, inputs in made(dp=2, pp=2, zero=0):
        feeds = [op for op in part.schedule.ops if op.kind == "feed" and op.source == "tokens"]
        assert {op.index for op in feeds} == set(range(each))
        for op in feeds:
            fed = inputs.host_work.feed(op, 1).view(torch.int32).view(2, -1)
            there = part.coordinates["dp"] * each + op.index
            assert np.array_equal(fed.numpy(), batches.chunk(2, there))


def test_stages_have_the_groups_that_they_carry():
    whole = initial_state(SPEC, 3, Recipe())
    found: dict[str, torch.Tensor] = {}
    for _, inputs in made(pp=4):
        assert not found.keys() & inputs.state.keys()
        found |= inputs.state
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], flat) for name, flat in whole.items())


def test_shards_make_the_whole_state():
    whole = initial_state(SPEC, 3, Recipe())
    shards = [dict(inputs.state) for _, inputs in made(dp=2, zero=3)]
    found = ShardedState(SPEC, Recipe(), Layout(dp=2, zero=3)).whole(shards)
    assert all(torch.equal(found[name], flat) for name, flat in whole.items())
