"""Classes are cut into products of cells, and what meets still meets in one order."""

from random import Random

import pytest

from tests.clusters.random_jobs import job_of, lowered, random_job
from tests.schedule.cluster.small_clusters import build
from twinstream.schedule.cluster.splitting import SplitError, expanded, split, with_straggler
from twinstream.schedule.cluster.verify import verify


@pytest.mark.parametrize("seed", range(25))
def test_every_rank_of_a_random_layout_is_a_class_that_is_safe(seed):
    job = random_job(seed)
    if job.layout.num_gpus > 48:
        return
    schedule = lowered(job)
    ranks = expanded(schedule)
    assert len(ranks.classes) == schedule.mesh.size
    assert verify(ranks) == []
    assert expanded(ranks).classes == ranks.classes


def test_every_rank_of_random_small_clusters_is_a_class_that_is_safe():
    found = [build(Random(seed)) for seed in range(60)]
    # in those with rings the two ends need not be issued one after the other
    cut = [one for one in found if all(len(dict(e.sides)) == len(e.sides) for e in one.order)]
    assert len(cut) > 20
    assert all(verify(expanded(one)) == [] for one in cut)


def test_classes_are_products_of_cells_and_share_schedules():
    schedule = lowered(job_of(2, pp=2, dp=4, tp=2))
    cut = split(schedule, {"dp": ((0,), (1, 2, 3)), "tp": ((0, 1),)})
    assert [(one.name, one.schedule, one.cells) for one in cut.classes] == [
        ("stage 0, dp 0", "stage 0", {"pp": (0,), "dp": (0,)}),
        ("stage 0, dp 1-3", "stage 0", {"pp": (0,), "dp": (1, 2, 3)}),
        ("stage 1, dp 0", "stage 1", {"pp": (1,), "dp": (0,)}),
        ("stage 1, dp 1-3", "stage 1", {"pp": (1,), "dp": (1, 2, 3)}),
    ]
    assert cut.schedules == schedule.schedules
    assert verify(cut) == []


def test_collectives_along_a_cut_axis_have_a_side_more_and_others_are_twice():
    schedule = lowered(job_of(1, dp=4, tp=2, zero=0))
    cut = split(schedule, {"dp": ((0,), (1, 2, 3))})
    classes = ("stage 0, dp 0", "stage 0, dp 1-3")
    sides = [one.sides for one in cut.order]
    assert tuple((name, "reduce.0") for name in classes) in sides
    assert all(((name, "embed_scatter.0"),) in sides for name in classes)
    along_dp = sum(
        "dp" in op.axes for op in schedule.schedules["stage 0"].ops if op.kind == "communicate"
    )
    assert len(cut.order) == 2 * len(schedule.order) - along_dp


def test_in_a_ring_that_is_cut_all_but_one_receive_first():
    schedule = lowered(job_of(1, cp=4))
    ranks = expanded(schedule)
    assert [one.schedule for one in ranks.classes] == ["stage 0"] + 3 * ["stage 0, receiving first"]
    ids = {
        name: [op.op_id for op in part.ops if op.op_id.endswith(".0.0.1")]
        for name, part in ranks.schedules.items()
    }
    sent, received, *_ = ids["stage 0"]
    assert (sent, received) == ("ring_send.0.0.1", "ring_recv.0.0.1")
    assert ids["stage 0, receiving first"][:2] == [received, sent]
    steps = [one.sides for one in ranks.order if one.sides[0][1] == sent]
    names = [one.name for one in ranks.classes]
    assert steps == [((names[i], sent), (names[(i + 1) % 4], received)) for i in range(4)]


def test_a_ring_cannot_be_cut_in_two():
    schedule = lowered(job_of(1, cp=4))
    with pytest.raises(SplitError, match="cut that axis into single coordinates, or not at all"):
        split(schedule, {"cp": ((0,), (1, 2, 3))})


@pytest.mark.parametrize("parts", [((0,), (1,)), ((0, 1), (1, 2)), ((0, 1, 2, 3),)])
def test_cells_must_be_all_of_the_axis_once(parts):
    with pytest.raises(SplitError, match=r"axis 'dp' are not each of its 3 coordinates once"):
        split(lowered(job_of(1, dp=3)), {"dp": parts})


def test_the_axis_must_be_known():
    with pytest.raises(SplitError, match="no axis 'cp', it has pp, dp"):
        split(lowered(job_of(1, dp=3)), {"cp": ((0,),)})


@pytest.mark.parametrize(
    ("rank", "fields", "num_classes"),
    [
        (3, {"dp": 4}, 2),
        (3, {"dp": 2, "tp": 2}, 4),
        (9, {"pp": 2, "dp": 4, "tp": 2}, 8),
        (5, {"cp": 3, "tp": 2}, 6),
    ],
)
def test_a_straggler_is_a_class_of_one_rank(rank, fields, num_classes):
    schedule = lowered(job_of(2, **fields))
    cut, name = with_straggler(schedule, rank)
    assert len(cut.classes) == num_classes and verify(cut) == []
    (found,) = [one for one in cut.classes if one.name == name]
    at = {axis.name: found.cell(axis.name, axis.size) for axis in cut.mesh.axes}
    assert cut.mesh.rank({axis: cell[0] for axis, cell in at.items()}) == rank
    assert cut.num_ranks(found) == 1
    assert sum(map(cut.num_ranks, cut.classes)) == cut.mesh.size


def test_a_straggler_among_many_ranks_makes_few_classes():
    cut, _ = with_straggler(lowered(job_of(2, pp=2, dp=512, tp=8)), 4321)
    assert len(cut.classes) == 2 * 2 * 2
