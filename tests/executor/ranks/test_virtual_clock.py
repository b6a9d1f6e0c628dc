"""The dispatch loops of all ranks and the cluster's simulator agree to the nanosecond.

Ops are given times, by rank; nothing is shared. What differs is all the rest: who waits for whom,
over several passes, and when what meets ends.
"""

from random import Random
from zlib import crc32

import pytest

from tests.clusters.random_jobs import DENSE, job_of, lowered
from tests.helpers.fixed_costs import FixedCosts
from tests.helpers.virtual_ranks import run_virtual_ranks
from tests.schedule.cluster.small_clusters import build
from twinstream.schedule.cluster.projecting import rank_part
from twinstream.schedule.cluster.splitting import expanded
from twinstream.schedule.document import Exchange, RankClass, Schedule
from twinstream.schedule.ops import Communicate, Compute, Op
from twinstream.schedule.timeline import PassSpans, Timeline
from twinstream.simulator.network_costs import ExchangeCost
from twinstream.simulator.replay import replay_cluster

NUM_PASSES = 4


def given_ns(rank: int, op: Op) -> int:
    """Of what meets the same on all sides: by its axes and sequence; of kernels by call."""
    if isinstance(op, Communicate):
        return crc32(f"{op.axes} {op.sequence}".encode()) % 700
    told = op.call if isinstance(op, Compute) else op.op_id
    return crc32(f"{rank} {told}".encode()) % 1000


def alike_ns(rank: int, op: Op) -> int:
    return given_ns(0, op)


class GivenTimes:
    """The same as costs of a cluster with a class for each rank."""

    def __init__(self, schedule: Schedule, duration_ns: object, wait_ns: int) -> None:
        self._schedule, self._wait_ns = schedule, wait_ns
        self._duration_ns = duration_ns
        self._ops = {
            (one.name, op.op_id): op for one in schedule.classes for op in schedule.of(one).ops
        }

    def rank(self, number: int) -> FixedCosts:
        rank = first_rank(self._schedule, self._schedule.classes[number])
        return FixedCosts(lambda op: self._duration_ns(rank, op), self._wait_ns)

    def exchange(self, exchange: Exchange) -> ExchangeCost:
        return ExchangeCost(self._duration_ns(0, self._ops[exchange.sides[0]]), 0.0)


def first_rank(schedule: Schedule, one: RankClass) -> int:
    mesh = schedule.mesh
    return mesh.rank({axis.name: one.cell(axis.name, axis.size)[0] for axis in mesh.axes})


def by_op(op_ids: tuple[str, ...], spans: PassSpans) -> dict[str, tuple[int, int]]:
    return dict(zip(op_ids, zip(spans.start_ns, spans.end_ns, strict=True), strict=True))


def assert_equal(
    schedule: Schedule, executed: dict[int, list[PassSpans]], simulated: Timeline,
    documented: Schedule,
) -> None:  # fmt: skip
    """The first pass, and the two that the simulator ended with, when passes began to repeat.

    `documented` is what was simulated.
    """
    ended = set(range(1, NUM_PASSES))
    for rank, passes in executed.items():
        ids = tuple(op.op_id for op in rank_part(schedule, rank).schedule.ops)
        timeline = simulated.classes[rank_part(documented, rank).class_name]
        assert by_op(ids, passes[0]) == by_op(timeline.op_ids, timeline.cold)
        theirs = [by_op(timeline.op_ids, one) for one in timeline.passes]
        mine = [by_op(ids, one) for one in passes]
        ended &= {at for at in ended if mine[at + 1 - len(theirs) : at + 1] == theirs}
        assert ended, "of all ranks, the same passes"


def has_ring(schedule: Schedule) -> bool:
    return any(len({name for name, _ in one.sides}) < len(one.sides) for one in schedule.order)


@pytest.mark.parametrize("wait_ns", [0, 3])
@pytest.mark.parametrize("seed", range(30))
def test_random_clusters_run_as_simulated(seed, wait_ns):
    schedule = build(Random(seed), most_ranks=8)
    costs = GivenTimes(schedule, alike_ns, wait_ns)
    simulated = replay_cluster(schedule, costs, "given", num_passes=NUM_PASSES)
    executed = run_virtual_ranks(schedule, alike_ns, wait_ns, NUM_PASSES)
    assert_equal(schedule, executed, simulated, schedule)


def test_ranks_that_are_not_alike_run_as_simulated():
    documents = (build(Random(seed), most_ranks=8) for seed in range(100, 140))
    several = [document for document in documents if not has_ring(document)]
    assert len(several) > 15
    for schedule in several:
        parted = expanded(schedule)
        costs = GivenTimes(parted, given_ns, 3)
        simulated = replay_cluster(parted, costs, "given", num_passes=NUM_PASSES)
        executed = run_virtual_ranks(schedule, given_ns, 3, NUM_PASSES)
        assert_equal(schedule, executed, simulated, parted)


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved", "ring", "zero_bubble"])
def test_pipelines_of_four_stages_and_two_replicas_run_as_simulated(order):
    shape = DENSE.model_copy(update={"num_layers": 8})
    virtual = 2 if order in ("interleaved", "ring") else 1
    fields = {"pp": 4, "dp": 2, "virtual_stages": virtual, "pipeline": order, "zero": 1}
    schedule = lowered(job_of(8, shape, **fields))
    parted = expanded(schedule)
    costs = GivenTimes(parted, given_ns, 5)
    simulated = replay_cluster(parted, costs, "given", num_passes=NUM_PASSES)
    executed = run_virtual_ranks(schedule, given_ns, 5, NUM_PASSES)
    assert_equal(schedule, executed, simulated, parted)
