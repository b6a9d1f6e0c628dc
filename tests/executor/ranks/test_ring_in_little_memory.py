"""A ring of four ranks trains a model whose state does not fit the memory of all four together."""

from functools import partial

import torch

from tests.executor.ranks.test_pipelines import given
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import bits_of
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.program.options import RunOptions
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.workload import Workload

SPEC = load_preset("tiny").model_copy(update={"num_layers": 8})
WORKLOAD = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=1, rounds_per_step=4)
CAP_BYTES = 4 * 2**20


def state_bytes(part: RankSchedule) -> int:
    return sum(
        tensor.size_bytes
        for tensor in part.tensors
        if tensor.parent is None and tensor.role in ("parameter", "optimizer_state")
    )


def test_a_ring_trains_what_none_of_its_ranks_and_not_all_of_them_hold(four: RankProcesses):
    layout = Layout(pp=4, virtual_stages=2, pipeline="ring")
    caps = Caps(device_bytes=CAP_BYTES)
    schedule = plan_pipeline(Job.of_step(SPEC, WORKLOAD, Recipe(), layout), MACHINE, caps)
    require_safe(schedule)
    parts = list(schedule.schedules.values())
    assert all(arena_bytes(part, DEVICE) <= CAP_BYTES < state_bytes(part) for part in parts)
    assert sum(map(state_bytes, parts)) > 4 * CAP_BYTES

    outcomes = four.execute(schedule, partial(given), RunOptions(num_passes=3))
    expected = bits_of(planned(lower(SPEC, WORKLOAD), MACHINE, Caps(), "resident"))
    fetched = [one for outcome in outcomes for one in outcome.fetched]
    losses = [one.values.view(torch.float32).item() for one in fetched if one.sink == "loss"]
    assert tuple(losses) == expected.losses
    for outcome in outcomes:
        for name, flat in outcome.state.items():
            assert torch.equal(flat, expected.state[name]), name
