"""One slow rank: all wait for it, and the step is as long as if all were slow."""

from typing import Any

import pytest

from tests.clusters.random_jobs import DENSE, job_of, lowered
from tests.hardware_profiles.machines import number
from tests.simulator.cluster.real_clusters import spans_of, two_passes
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.schedule.cluster.splitting import split, with_straggler
from twinstream.schedule.cluster.verify import verify

CLUSTER = "h100_dgx"
NODE = machine_of(load_cluster(CLUSTER))
SLOW = NODE.model_copy(
    update={
        "hbm_bytes_per_s": number(NODE.number("hbm_bytes_per_s") / 2),
        "peak_bf16_flop_per_s": number(NODE.number("peak_bf16_flop_per_s") / 2),
        "content_hash": "slow",
    }
)


@pytest.mark.parametrize(
    ("rank", "fields"),
    [
        (2, {"dp": 4, "zero": 0}),
        (5, {"dp": 8, "zero": 3}),
        (3, {"tp": 2, "dp": 2}),
        (6, {"tp": 2, "pp": 2, "dp": 2, "zero": 2}),
        (9, {"pp": 4, "tp": 2, "dp": 2, "virtual_stages": 2, "pipeline": "interleaved"}),
    ],
)
def test_the_slow_rank_does_what_it_would_if_all_of_its_stage_were_slow(
    rank: int, fields: dict[str, Any]
):
    schedule = lowered(job_of(4, **fields))
    cut, name = with_straggler(schedule, rank)
    assert verify(cut) == []
    (slow,) = [one for one in cut.classes if one.name == name]
    assert cut.num_ranks(slow) == 1
    stage = name.partition(",")[0]
    one_slow = two_passes(cut, CLUSTER, {name: SLOW})
    all_slow = two_passes(schedule, CLUSTER, {stage: SLOW})
    none_slow = two_passes(schedule, CLUSTER)
    assert spans_of(one_slow.classes[name]) == spans_of(all_slow.classes[stage])
    assert one_slow.step_ns == all_slow.step_ns > none_slow.step_ns


def test_in_a_ring_it_is_its_neighbours_that_wait():
    """Messages are then not beside the same kernels as if all were slow: nearly as long a step."""
    schedule = lowered(job_of(4, cp=4))
    cut, name = with_straggler(schedule, 1)
    assert verify(cut) == [] and len(cut.classes) == 4
    one_slow = two_passes(cut, CLUSTER, {name: SLOW})
    all_slow = two_passes(schedule, CLUSTER, {"stage 0": SLOW})
    assert one_slow.step_ns == pytest.approx(all_slow.step_ns, rel=0.01)
    assert one_slow.step_ns > 1.05 * two_passes(schedule, CLUSTER).step_ns


def test_the_others_wait_for_it():
    schedule = lowered(job_of(4, dp=4, zero=0))
    cut, name = with_straggler(schedule, 2)
    assert [one.name for one in cut.classes] == ["stage 0, dp 2", "stage 0, dp 0-1,3"]
    timeline = two_passes(cut, CLUSTER, {name: SLOW})
    slow, fast = (spans_of(timeline.classes[one.name]) for one in cut.classes)
    for op in ("reduce.0", "reduce_norm"):
        assert [end for _, end in slow[op]] == [end for _, end in fast[op]]
        assert all(a > b for (a, _), (b, _) in zip(slow[op], fast[op], strict=True))
    lasts = {one: spans["backward.1.3"] for one, spans in (("slow", slow), ("fast", fast))}
    took = {one: end - start for one, ((start, end), *_) in lasts.items()}
    assert took["slow"] > 1.5 * took["fast"]


def test_a_class_that_is_split_and_not_slow_is_as_before():
    schedule = lowered(job_of(4, dp=4, pp=2, tp=2))
    cut, name = with_straggler(schedule, 11)
    whole, single = two_passes(schedule, CLUSTER), two_passes(cut, CLUSTER, {name: NODE})
    for one in cut.classes:
        of_stage = whole.classes[one.name.partition(",")[0]]
        assert spans_of(single.classes[one.name]) == spans_of(of_stage)


def test_two_slow_replicas_are_a_class():
    schedule = lowered(job_of(2, DENSE, dp=4))
    cut = split(schedule, {"dp": ((0, 1), (2, 3))})
    slow = two_passes(cut, CLUSTER, {"stage 0, dp 0-1": SLOW})
    assert slow.step_ns == two_passes(schedule, CLUSTER, {"stage 0": SLOW}).step_ns
