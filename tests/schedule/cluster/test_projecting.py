"""What a rank does and whom it meets: as a list of all ranks and all groups says."""

from itertools import product
from random import Random

import pytest

from tests.schedule.cluster.pipeline import cluster
from tests.schedule.cluster.small_clusters import build
from twinstream.schedule.cluster.projecting import all_channels, project, rank_part
from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.ops import Communicate


def test_a_rank_runs_the_schedule_of_its_class():
    schedule = cluster()
    assert [project(schedule, rank) for rank in range(4)] == [
        schedule.schedules[name] for name in ("first", "first", "second", "second")
    ]
    part = rank_part(schedule, 3)
    assert part.place == "rank 3 (pp 1, dp 1)"
    assert (part.class_name, dict(part.coordinates)) == ("second", {"pp": 1, "dp": 1})
    # give sends to stage 0, rank 1; sum is over both replicas of stage 1
    members = {name: channel.members for name, channel in part.channels.items()}
    assert members == {"take": (1, 3), "give": (3, 1), "sum": (2, 3)}


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ArgumentError, match="rank needs a whole number from 0 to 3, got 4"):
        project(cluster(), 4)


@pytest.mark.parametrize("seed", range(40))
def test_sides_that_meet_have_one_channel_and_all_know_it(seed):
    schedule = build(Random(seed), most_ranks=8)
    parts = [rank_part(schedule, rank) for rank in range(schedule.mesh.size)]
    channels = all_channels(schedule)
    assert len(set(channels)) == len(channels)
    assert set(channels) == {channel for part in parts for channel in part.channels.values()}
    for part, other in product(parts, parts):
        for op in part.schedule.ops:
            if not isinstance(op, Communicate):
                continue
            channel = part.channels[op.op_id]
            if other.rank not in channel.members or other is part:
                continue
            kinds = {"send": "recv", "recv": "send"}
            theirs = [
                one for one in other.schedule.ops
                if isinstance(one, Communicate) and other.channels[one.op_id] == channel
                and one.sequence == op.sequence
                and one.collective == kinds.get(op.collective, op.collective)
            ]  # fmt: skip
            assert len(theirs) == 1


def test_members_differ_along_the_axes_alone():
    for seed in range(40):
        schedule = build(Random(seed), most_ranks=8)
        mesh = schedule.mesh
        for rank in range(mesh.size):
            part = rank_part(schedule, rank)
            for op in part.schedule.ops:
                if not isinstance(op, Communicate):
                    continue
                here, others = mesh.coordinates(rank), set(mesh.names) - set(op.axes)
                expected = [
                    r for r in range(mesh.size)
                    if all(mesh.coordinates(r)[axis] == here[axis] for axis in others)
                ]  # fmt: skip
                members = part.channels[op.op_id].members
                if op.shift:
                    ends = members if op.collective == "send" else members[::-1]
                    (axis,) = op.axes
                    there = (here[axis] + op.shift) % mesh.length(axis)
                    assert ends == (rank, mesh.rank({**here, axis: there}))
                else:
                    assert list(members) == expected
