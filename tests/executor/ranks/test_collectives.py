"""Every collective on four processes gives what a plain computation gives; in rank order its bits.

Sums of expected values are written out: the first two, then the third, then the fourth.
"""

import pytest
import torch

from tests.executor.ranks.talks import Talk, among_equals, fed, taken, value
from tests.schedule.cluster.small_clusters import mesh_of
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.rank_run import RankOutcome
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.ops import Communicate

NUM_PASSES = 3
RANKS = range(4)
WHOLE = 1024
# Equal shards; some elements are left over; of fewer than are worth sharding; of each type.
SUMS = [(4096, "float32"), (4099, "float32"), (4098, "bfloat16"), (5, "bfloat16"), (1, "float32"),
        (2047, "float16")]  # fmt: skip
Outcomes = list[RankOutcome]


def rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def pairwise(parts: list[torch.Tensor]) -> torch.Tensor:
    """Each sum is rounded to the type."""
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


HOW = {"rank_order": rank_order, "pairwise": pairwise}


def one_of_each() -> Talk:
    talk = Talk()
    for count, dtype in SUMS:
        talk.feed(f"sum.{dtype}.{count}", count, dtype)
        talk.say("all_reduce", ["dp"], f"sum.{dtype}.{count}")
    for dtype in ("float32", "bfloat16"):
        for reduction in ("rank_order", "pairwise", "library"):
            name = f"{dtype}.{reduction}"
            queue = "lib" if reduction == "library" else "dp"
            how = {"reduction": reduction, "queue": queue}
            for kind in ("all", "in", "to", "then"):
                talk.feed(f"{kind}.{name}", WHOLE, dtype)
            talk.tensor(f"shard.{name}", WHOLE // 4, dtype)
            talk.say("all_reduce", ["dp"], f"all.{name}", **how)
            talk.say("reduce_scatter", ["dp"], f"in.{name}", **how)
            talk.say("reduce_scatter", ["dp"], f"to.{name}", f"shard.{name}", **how)
            talk.say("reduce_scatter", ["dp"], f"then.{name}", **how)
            talk.say("all_gather", ["dp"], f"then.{name}", queue="gather")
            talk.fetch(*(f"{kind}.{name}" for kind in ("all", "in", "shard", "then")))
    for name in ("gathered", "held", "given"):
        talk.feed(name, 64)
    talk.tensor("whole", 4 * 64)
    talk.tensor("swapped", 64)
    talk.tensor("come", 64)
    talk.say("all_gather", ["dp"], "gathered", "whole")
    talk.feed("last.first", WHOLE)
    for name, size in (("shard.last.first", WHOLE // 4), ("whole.last.first", WHOLE)):
        talk.tensor(name, size)
    turned = {"last_first": True, "queue": "turned"}
    talk.say(
        "reduce_scatter", ["dp"], "last.first", "shard.last.first", reduction="pairwise", **turned
    )
    talk.say("all_gather", ["dp"], "shard.last.first", "whole.last.first", **turned)
    talk.fetch("shard.last.first", "whole.last.first")
    talk.say("all_gather", ["dp"], "held")
    talk.say("all_to_all", ["dp"], "given", "swapped")
    talk.say("send_recv", ["dp"], "given", "come")
    talk.feed("there", 96)
    talk.place("back", "there")
    talk.say("send", ["dp"], "there", shift=1)
    talk.say("recv", ["dp"], taken="back", shift=-1)
    talk.fetch(*(f"sum.{dtype}.{count}" for count, dtype in SUMS))
    talk.fetch("whole", "held", "swapped", "come", "back")
    return talk


@pytest.fixture(scope="module")
def outcomes(four: RankProcesses) -> Outcomes:
    schedule = among_equals(mesh_of(dp=4), one_of_each())
    require_safe(schedule)
    return four.execute(schedule, fed, RunOptions(num_passes=NUM_PASSES, poison=True))


def each(outcomes: Outcomes) -> list[tuple[RankOutcome, int]]:
    return [(outcome, number) for outcome in outcomes for number in range(NUM_PASSES)]


@pytest.mark.parametrize(("count", "dtype"), SUMS)
def test_an_all_reduce_in_rank_order_has_the_bits_of_a_plain_sum(outcomes, count, dtype):
    name = f"sum.{dtype}.{count}"
    for outcome, number in each(outcomes):
        parts = [value(rank, name, number, count, dtype) for rank in RANKS]
        assert torch.equal(taken(outcome, name, number, dtype), rank_order(parts))
    if count > 1000:  # enough for another order, or sums in the type itself, to show
        other = rank_order(parts[::-1]) if dtype == "float32" else sum(parts[1:], parts[0])
        assert not torch.equal(other, rank_order(parts))


@pytest.mark.parametrize("order", HOW)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_have_the_bits_of_the_all_reduce(outcomes, dtype, order):
    """Both forms of reduce_scatter, and reduce_scatter then all_gather, which is all_reduce."""
    for outcome, number in each(outcomes):
        own = slice(outcome.rank * WHOLE // 4, (outcome.rank + 1) * WHOLE // 4)
        sums = {
            kind: HOW[order](
                [value(r, f"{kind}.{dtype}.{order}", number, WHOLE, dtype) for r in RANKS]
            )
            for kind in ("all", "in", "to", "then")
        }
        found = {
            kind: taken(outcome, f"{kind}.{dtype}.{order}", number, dtype)
            for kind in ("all", "in", "shard", "then")
        }
        assert torch.equal(found["all"], sums["all"])
        assert torch.equal(found["in"][own], sums["in"][own])
        assert torch.equal(found["shard"], sums["to"][own])
        assert torch.equal(found["then"], sums["then"])


def test_shards_lie_last_first_where_that_is_said(outcomes):
    for outcome, number in each(outcomes):
        sums = pairwise([value(r, "last.first", number, WHOLE, "float32") for r in RANKS])
        shard = sums.view(4, -1)[3 - outcome.rank]
        assert torch.equal(taken(outcome, "shard.last.first", number), shard)
        assert torch.equal(taken(outcome, "whole.last.first", number), sums)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("bfloat16", 8)])
def test_the_librarys_sums_are_near(outcomes, dtype, bits):
    """Within two roundings of each of three additions to the sum of magnitudes."""
    for outcome, number in each(outcomes):
        own = slice(outcome.rank * WHOLE // 4, (outcome.rank + 1) * WHOLE // 4)
        for kind, sink in (("all", "all"), ("in", "in"), ("to", "shard"), ("then", "then")):
            name = f"{kind}.{dtype}.library"
            parts = [value(rank, name, number, WHOLE, dtype).double() for rank in RANKS]
            error = 6 * 2.0**-bits * sum(part.abs() for part in parts)
            found = taken(outcome, f"{sink}.{dtype}.library", number, dtype).double()
            cut = own if kind in ("in", "to") else slice(None)
            found = found[own] if kind == "in" else found
            assert ((found - sum(parts)[cut]).abs() <= error[cut]).all()


def test_what_is_gathered_and_swapped_lies_in_rank_order(outcomes):
    for outcome, number in each(outcomes):
        gathered = [value(rank, "gathered", number, 64, "float32") for rank in RANKS]
        held = [value(r, "held", number, 64, "float32").view(4, 16)[r] for r in RANKS]
        given = [value(r, "given", number, 64, "float32").view(4, 16)[outcome.rank] for r in RANKS]
        assert torch.equal(taken(outcome, "whole", number), torch.cat(gathered))
        assert torch.equal(taken(outcome, "held", number), torch.cat(held))
        assert torch.equal(taken(outcome, "swapped", number), torch.cat(given))
        before = value((outcome.rank - 1) % 4, "given", number, 64, "float32")
        assert torch.equal(taken(outcome, "come", number), before)


def test_a_message_goes_round_a_ring(outcomes):
    for outcome, number in each(outcomes):
        before = value((outcome.rank - 1) % 4, "there", number, 96, "float32")
        assert torch.equal(taken(outcome, "back", number), before)


def test_clocks_of_one_machine_agree_within_the_error_stated(outcomes):
    assert outcomes[0].clock.offset_ns == outcomes[0].clock.error_ns == 0
    for outcome in outcomes[1:]:
        assert 0 < outcome.clock.error_ns < 1e9
        assert abs(outcome.clock.offset_ns) <= outcome.clock.error_ns


def test_no_side_of_a_collective_ends_before_all_have_begun(outcomes, four):
    """By the measured times, on one clock: rendezvous."""
    error_ns = 2 * max(outcome.clock.error_ns for outcome in outcomes)
    schedule = among_equals(mesh_of(dp=4), one_of_each()).schedules["all"]
    for at, op in enumerate(schedule.ops):
        if not isinstance(op, Communicate) or op.shift:
            continue
        spans = [outcome.timeline.cold for outcome in outcomes]
        begun = max(one.start_ns[at] for one in spans)
        assert min(one.end_ns[at] for one in spans) >= begun - error_ns, op.op_id


def test_scratch_is_told_and_is_of_the_largest_sum_of_each_stream(outcomes):
    # of 4,099 float32: shards of 1,024 from 4 ranks, and their sum; nothing for the library; where
    # shards lie last first those that are sent, too
    assert outcomes[0].scratch_bytes == (4 + 1) * 1024 * 4 + 2 * WHOLE * 4


def test_large_sums_are_made_in_stretches_and_have_the_same_bits(four):
    """More than 32 MiB at a time would be exchanged; scratch memory stays as for that."""
    shard = 2**21 + 1000  # of float32, in four shards
    talk = Talk()
    for kind, count in (("all", 4 * shard + 3), ("in", 4 * shard), ("to", 4 * shard)):
        talk.feed(kind, count)
    talk.tensor("shard", shard)
    talk.say("all_reduce", ["dp"], "all")
    talk.say("reduce_scatter", ["dp"], "in")
    talk.say("reduce_scatter", ["dp"], "to", "shard")
    talk.fetch("all", "in", "shard")
    schedule = among_equals(mesh_of(dp=4), talk)
    require_safe(schedule)
    outcomes = four.execute(schedule, fed, RunOptions(num_passes=1))
    parts = {k: [value(r, k, 0, 4 * shard, "float32") for r in RANKS] for k in ("in", "to")}
    sums = {kind: rank_order(of_ranks) for kind, of_ranks in parts.items()}
    whole = rank_order([value(r, "all", 0, 4 * shard + 3, "float32") for r in RANKS])
    for one in outcomes:
        own = slice(one.rank * shard, (one.rank + 1) * shard)
        assert torch.equal(taken(one, "all", 0), whole)
        assert torch.equal(taken(one, "in", 0)[own], sums["in"][own])
        assert torch.equal(taken(one, "shard", 0), sums["to"][own])
        assert one.scratch_bytes < 80 * 2**20
