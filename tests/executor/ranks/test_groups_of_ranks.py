"""Who meets whom in a mesh of two axes, and messages between stages."""

import torch

from tests.executor.ranks.talks import Talk, among_equals, fed, taken, value
from tests.schedule.cluster.small_clusters import cluster_of, mesh_of
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.program.options import RunOptions
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import RankClass, Schedule

MICROBATCHES = 3


def test_groups_are_the_ranks_that_differ_along_the_axes_alone(four: RankProcesses):
    talk = Talk()
    for name in ("outer", "inner", "both"):
        talk.feed(name, 300)
    talk.say("all_reduce", ["pp"], "outer")
    talk.say("all_reduce", ["dp"], "inner")
    talk.say("all_reduce", ["dp", "pp"], "both")
    talk.feed("x", 32)
    talk.tensor("all", 128)
    talk.say("all_gather", ["dp", "pp"], "x", "all")
    talk.fetch("outer", "inner", "both", "all")
    schedule = among_equals(mesh_of(pp=2, dp=2), talk)
    require_safe(schedule)
    outcomes = four.execute(schedule, fed, RunOptions(num_passes=1))
    groups = {
        "outer": {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)},
        "inner": {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)},
        "both": dict.fromkeys(range(4), (0, 1, 2, 3)),
    }
    for outcome in outcomes:
        assert outcome.coordinates == {"pp": outcome.rank // 2, "dp": outcome.rank % 2}
        for name, members in groups.items():
            total = torch.zeros(300)
            for rank in members[outcome.rank]:
                total = total + value(rank, name, 0, 300, "float32")
            assert torch.equal(taken(outcome, name, 0), total)
        parts = [value(rank, "x", 0, 32, "float32") for rank in range(4)]
        assert torch.equal(taken(outcome, "all", 0), torch.cat(parts))


def there_and_back() -> Schedule:
    """Two stages: the first sends all its messages before it takes any; two replicas sum."""
    first, second = Talk(), Talk()
    order = []
    for i in range(MICROBATCHES):
        first.feed(f"x{i}", 200)
        first.tensor(f"y{i}", 200)
        second.tensor(f"x{i}", 200)
        second.feed(f"y{i}", 200)
    for i in range(MICROBATCHES):
        sent = first.say("send", ["pp"], f"x{i}", shift=1)
        got = second.say("recv", ["pp"], taken=f"x{i}", shift=-1)
        order.append([("first", sent), ("second", got)])
    for i in range(MICROBATCHES):
        sent = second.say("send", ["pp"], f"y{i}", shift=-1)
        got = first.say("recv", ["pp"], taken=f"y{i}", shift=1)
        order.append([("second", sent), ("first", got)])
    for name, stage in (("first", first), ("second", second)):
        stage.feed("g", 1000, "bfloat16")
        order.append([(name, stage.say("all_reduce", ["dp"], "g"))])
        stage.fetch("g")
    first.fetch(*(f"y{i}" for i in range(MICROBATCHES)))
    second.fetch(*(f"x{i}" for i in range(MICROBATCHES)))
    classes = [
        RankClass(name=name, schedule=name, cells={"pp": (at,)})
        for at, name in enumerate(("first", "second"))
    ]
    schedules = {"first": first.schedule(), "second": second.schedule()}
    return cluster_of(mesh_of(pp=2, dp=2), classes, schedules, order)


def test_messages_in_flight_both_ways_between_stages_arrive_in_order(four: RankProcesses):
    schedule = there_and_back()
    require_safe(schedule)
    outcomes = four.execute(schedule, fed, RunOptions(num_passes=4))
    assert [outcome.class_name for outcome in outcomes] == ["first", "first", "second", "second"]
    for outcome in outcomes:
        peer, name = (outcome.rank + 2) % 4, "y" if outcome.rank < 2 else "x"
        for number in range(4):
            for i in range(MICROBATCHES):
                sent = value(peer, f"{name}{i}", number, 200, "float32")
                assert torch.equal(taken(outcome, f"{name}{i}", number), sent)


def test_a_pairs_messages_may_go_through_two_streams(four: RankProcesses):
    """The second may well be ready first: they are told apart by their sequence number."""
    talk, back = Talk(), []
    for i in range(6):
        talk.feed(f"x{i}", 50 if i % 2 else 50_000)
        talk.place(f"y{i}", f"x{i}")
    for i in range(6):
        talk.say("send", ["dp"], f"x{i}", shift=1, queue=f"send.{i % 2}")
        talk.say("recv", ["dp"], taken=f"y{i}", shift=-1, queue=f"recv.{i % 2}")
        back.append(f"y{i}")
    talk.fetch(*back)
    schedule = among_equals(mesh_of(dp=4), talk)
    require_safe(schedule)
    for outcome in four.execute(schedule, fed, RunOptions(num_passes=3)):
        for number in range(3):
            for i in range(6):
                count = 50 if i % 2 else 50_000
                sent = value((outcome.rank - 1) % 4, f"x{i}", number, count, "float32")
                assert torch.equal(taken(outcome, f"y{i}", number), sent)
