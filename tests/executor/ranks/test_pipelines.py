"""A pipeline of a model on processes has one device's bits: losses, weights, optimizer state."""

from functools import partial

import pytest
import torch

from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import bits_of, training
from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.rank_run import RankInputs
from twinstream.executor.state.training_state import initial_state
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE

SPEC = small("tiny", num_layers=8)
WORKLOAD = WORKLOADS["packed"].model_copy(update={"rounds_per_step": 4})


def given(part: RankPart) -> RankInputs:
    """The whole state to every rank, as `bits_of` begins."""
    spec = ModelSpec.model_validate(part.schedule.model.spec)
    recipe = Recipe.model_validate(part.schedule.recipe)
    host_work = training(part.schedule).host_work(part.schedule)
    return RankInputs(host_work, initial_state(spec, seed=1, recipe=recipe))


def assert_one_device_s_bits(four: RankProcesses, schedule: Schedule) -> None:
    require_safe(schedule)
    outcomes = four.execute(schedule, partial(given), RunOptions(num_passes=3))
    expected = bits_of(planned(lower(SPEC, WORKLOAD), MACHINE, Caps(), "resident"))
    fetched = [one for outcome in outcomes for one in outcome.fetched]
    losses = [one.values.view(torch.float32).item() for one in fetched if one.sink == "loss"]
    assert tuple(losses) == expected.losses
    found = {name: flat for outcome in outcomes for name, flat in outcome.state.items()}
    assert found.keys() == expected.state.keys()
    for name, flat in expected.state.items():
        assert torch.equal(found[name], flat), name


def num_ops(schedule: Schedule, kind: type) -> int:
    return sum(isinstance(op, kind) for part in schedule.schedules.values() for op in part.ops)


@pytest.mark.parametrize(
    ("order", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("ring", 2)]
)
def test_four_stages_have_the_bits_of_one_device(four: RankProcesses, order, virtual):
    layout = Layout(pp=4, pipeline=order, virtual_stages=virtual)
    schedule = plan_pipeline(Job.of_step(SPEC, WORKLOAD, Recipe(), layout), MACHINE)
    assert_one_device_s_bits(four, schedule)


@pytest.mark.parametrize(
    ("order", "virtual", "host"),
    [("1f1b", 1, 0.5), ("gpipe", 1, 0.45), ("interleaved", 2, 0.4), ("ring", 2, 0.38)],
)
def test_stages_that_offload_and_recompute_have_them_too(four, order, virtual, host):
    """Each with 60 % of the device memory that it would use, and less of the host's."""
    stages = Job.of_step(
        SPEC, WORKLOAD, Recipe(), Layout(pp=4, pipeline=order, virtual_stages=virtual)
    )
    ample = plan_pipeline(stages, MACHINE)
    used = [arena_bytes(part, DEVICE) for part in ample.schedules.values()]
    caps = {
        stage: Caps(device_bytes=size * 6 // 10, host_bytes=int(size * host))
        for stage, size in enumerate(used)
    }
    schedule = plan_pipeline(stages, MACHINE, caps)
    assert num_ops(schedule, Copy) > 2 * num_ops(ample, Copy)
    assert num_ops(schedule, Compute) > num_ops(ample, Compute)
    assert_one_device_s_bits(four, schedule)
