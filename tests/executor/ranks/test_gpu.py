"""Ranks on two GPUs by NCCL: the bits of one GPU, lost ranks, clocks."""

from dataclasses import replace
from functools import partial
from time import monotonic

import pytest
import torch

from tests.executor.ranks.faulty import going_wrong, summing
from tests.executor.ranks.talks import fed, taken, value
from tests.executor.ranks.test_pipelines import SPEC, WORKLOAD, given
from tests.executor.ranks.trained import Case, states, train_ranks
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import run
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.errors import RanksError
from twinstream.executor.ranks.world import Patience
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
OP = r"op 'all_reduce.x.' \(all_reduce\) of pass 2"


def test_sums_have_the_bits_of_the_cpu():
    with RankProcesses(2) as processes:
        outcomes = processes.execute(summing(2), fed, RunOptions("cuda", num_passes=3))
    for number in range(3):
        total = sum(value(rank, "x", number, 1000, "float32") for rank in range(2))
        assert all(torch.equal(taken(outcome, "x", number), total) for outcome in outcomes)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize(("order", "virtual"), [("1f1b", 1), ("interleaved", 2), ("ring", 2)])
def test_pipelines_have_the_bits_of_one_gpu(order, virtual, graphs):
    layout = Layout(pp=2, pipeline=order, virtual_stages=virtual)
    stages = Job.of_step(SPEC, WORKLOAD, Recipe(), layout)
    used = max(
        arena_bytes(part, DEVICE) for part in plan_pipeline(stages, MACHINE).schedules.values()
    )
    schedule = plan_pipeline(stages, MACHINE, Caps(device_bytes=used * 6 // 10))
    options = RunOptions("cuda", num_passes=4, graphs=graphs, refuses_excess=False)
    with RankProcesses(2) as processes:
        outcomes = processes.execute(schedule, partial(given), options)
    alone = planned(lower(SPEC, WORKLOAD), MACHINE, Caps(), "resident")
    expected = run(alone, RunOptions("cuda", num_passes=4))[1]
    for outcome in outcomes:
        for name, flat in outcome.state.items():
            assert torch.equal(flat, expected.state[name]), name
        assert outcome.timeline.provenance.clock_error_ns is not None
        assert outcome.timeline.provenance.clock_error_ns + outcome.clock.error_ns < 5_000_000


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_have_the_bits_of_one_process(zero, monkeypatch):
    case = Case(Layout(dp=2, zero=zero))
    asked = RankProcesses.execute

    def on_gpus(self, schedule, make, options):
        return asked(self, schedule, make, replace(options, backend="cuda", refuses_excess=False))

    monkeypatch.setattr(RankProcesses, "execute", on_gpus)
    with RankProcesses(2) as processes:
        whole, found = (train_ranks(one, processes) for one in (Case(Layout(dp=2, zero=0)), case))
    for state in states(case, found):
        for name, flat in state.items():
            assert torch.equal(flat, whole[0].state[name]), name


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", rf"rank 1 was killed by signal 9 \(SIGKILL\): .*{OP}"),
        ("stopped", rf"rank 1 does not answer: rank 0 \(dp 0\) waited \d s for rank 1 in {OP}"),
        ("sleeps", rf"rank 1 does not get there: .* waited \d s for rank 1 in {OP}"),
    ],
)
def test_a_lost_rank_is_named_and_nothing_is_left(how, message):
    begin_s = monotonic()
    with (
        RankProcesses(2, Patience(timeout_s=4)) as processes,
        pytest.raises(RanksError, match=message),
    ):
        processes.execute(summing(2), partial(going_wrong, how), RunOptions("cuda", num_passes=4))
    assert not any(process.is_alive() for process in processes._processes)
    assert monotonic() - begin_s < 120
