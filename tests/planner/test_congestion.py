"""Waits of compute for copies are found, and the links get less to do only where they were late."""

from itertools import pairwise

import pytest

from tests.helpers.machines_for_plans import slow_link_machine
from tests.helpers.plans import enough_device_bytes, planned
from tests.helpers.sketches import op, sketch
from tests.helpers.small_chains import Sort, build_chain, link_machine
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.models.lowering.lower import lower
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import LIMITS
from twinstream.planner.search.congestion import Shares, Stall, less_where_waited, stalls
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.timeline import PassSpans
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate_rank

MS = 1_000_000
TOLERANCE_NS = 5_000
EVENT_NS = 50_000  # of the CPU profile: compute starts so long after what it waits for has ended
LEAST = LIMITS.least_share

# Seven tasks; x is loaded while t0 and t1 run, and t2 waits for it.
CHAIN = build_chain([Sort("x", 1, "parameter", {2: ("read", 0)})], [1.0] * 7)


def late_load(end_ns: int, begin_ns: int = 0) -> tuple[RankSchedule, PassSpans]:
    """t0 and t1 take a ms each, then t2 waits for a load of so long, and the others follow."""
    ops = [op("t0", "compute"), op("load", "h2d"), op("t1", "compute")]
    ops.append(op("t2", "compute", ("load",)))
    ops += [op(f"t{i}", "compute") for i in range(3, 7)]
    t2 = max(2 * MS, end_ns)
    spans = [(0, MS), (begin_ns, end_ns), (MS, 2 * MS)]
    spans += [(t2 + i * MS, t2 + (i + 1) * MS) for i in range(5)]
    starts, ends = zip(*spans, strict=True)
    return sketch(ops), PassSpans(start_ns=starts, end_ns=ends)


def full_shares(num_tasks: int) -> Shares:
    return dict.fromkeys(("h2d", "d2h"), (1.0,) * num_tasks)


def less(shares: Shares, schedule: RankSchedule, spans: PassSpans) -> Shares | None:
    """Of the chain of seven tasks."""
    view = ChainView(CHAIN)
    return less_where_waited(shares, schedule, spans, (view, view), LIMITS)


def idle_ns(schedule: RankSchedule, spans: PassSpans) -> tuple[int, int]:
    """Time between compute ops, and how many there are."""
    ops = [i for i, op in enumerate(schedule.ops) if isinstance(op, Compute)]
    return sum(spans.start_ns[b] - spans.end_ns[a] for a, b in pairwise(ops)), len(ops)


# --- stalls


def test_a_wait_for_a_late_load_is_found_with_its_length_and_since_when_the_queue_was_busy():
    schedule, spans = late_load(3 * MS, MS // 2)
    assert stalls(schedule, spans) == [Stall(3, "h2d", MS, MS // 2)]


def test_a_load_in_time_or_a_wait_shorter_than_a_few_us_is_no_stall():
    assert stalls(*late_load(2 * MS)) == []
    assert stalls(*late_load(2 * MS + TOLERANCE_NS - 1)) == []
    assert len(stalls(*late_load(2 * MS + TOLERANCE_NS))) == 1


def test_a_wait_for_other_compute_is_no_stall():
    schedule = sketch([op("t0", "compute"), op("t1", "compute", ("t0",))])
    assert stalls(schedule, PassSpans(start_ns=(0, 3 * MS), end_ns=(MS, 4 * MS))) == []


def test_of_several_copies_the_last_to_end_is_what_compute_waited_for():
    waiting = op("t1", "compute", ("load", "store"))
    schedule = sketch([op("t0", "compute"), op("load", "h2d"), op("store", "d2h"), waiting])
    spans = PassSpans(start_ns=(0, 0, MS, 5 * MS), end_ns=(MS, 2 * MS, 5 * MS, 6 * MS))
    assert stalls(schedule, spans) == [Stall(3, "d2h", 4 * MS, MS)]


@pytest.mark.parametrize(("pause_ns", "busy_since_ns"), [(49_000, 0), (51_000, MS + 51_000)])
def test_a_queue_is_busy_across_short_pauses_only(pause_ns, busy_since_ns):
    waiting = op("t1", "compute", ("late",))
    schedule = sketch([op("t0", "compute"), op("early", "h2d"), op("late", "h2d"), waiting])
    late_ns = MS + pause_ns
    spans = PassSpans(
        start_ns=(0, 0, late_ns, late_ns + 3 * MS),
        end_ns=(2 * MS, MS, late_ns + 3 * MS, late_ns + 4 * MS),
    )
    assert [stall.since_ns for stall in stalls(schedule, spans)] == [busy_since_ns]


def test_the_waits_found_of_a_small_chain_on_a_slow_link_are_all_the_time_compute_is_idle():
    """Each parameter takes 6.4 ms to load, each task one."""
    sorts = [Sort(f"x{i}", 1, "parameter", {i: ("read", 0)}) for i in range(6)]
    chain, machine = build_chain(sorts, [1.0] * 6), link_machine(h2d=10.0, d2h=10.0)
    schedule = planned(chain, machine, Caps(device_bytes=2 * 2**26), "streaming")
    spans = simulate_rank(schedule, machine).passes[-1]
    found = stalls(schedule, spans)
    idle, num_ops = idle_ns(schedule, spans)
    assert idle > 20 * MS
    assert abs(idle - sum(stall.waited_ns for stall in found)) <= TOLERANCE_NS * num_ops
    assert {stall.queue for stall in found} == {"h2d"}


@pytest.mark.parametrize("workload", ["packed", "sliced"])
def test_the_waits_found_of_a_tiny_chain_are_all_the_time_compute_is_idle(workload):
    chain, machine = tiny_chain(workload), slow_link_machine()
    least = enough_device_bytes(chain, "streaming")
    schedule = planned(chain, machine, Caps(device_bytes=least), "streaming")
    spans = simulate_rank(schedule, machine).passes[-1]
    found = stalls(schedule, spans)
    idle, num_ops = idle_ns(schedule, spans)
    assert idle > 100 * TOLERANCE_NS * num_ops
    assert abs(idle - sum(stall.waited_ns for stall in found)) <= TOLERANCE_NS * num_ops
    for stall in found:
        busy = [
            (spans.start_ns[i], spans.end_ns[i])
            for i, copy in enumerate(schedule.ops)
            if isinstance(copy, Copy) and copy.stream.queue == stall.queue
        ]
        assert stall.since_ns in {start for start, _ in busy}
        waited_until = spans.start_ns[stall.op]
        assert waited_until - EVENT_NS in {end for _, end in busy}


# --- less where compute waited


def test_without_stalls_there_is_nothing_to_learn():
    shares = full_shares(7)
    assert less(shares, *late_load(2 * MS)) is None


def test_only_tasks_beside_the_late_queue_lose_a_share_of_its_link():
    schedule, spans = late_load(3 * MS, begin_ns=MS + MS // 2)
    found = less(full_shares(7), schedule, spans)
    assert found is not None
    assert found["d2h"] == (1.0,) * 7
    assert [share < 1.0 for share in found["h2d"]] == [False, True, *[False] * 5]


def test_a_queue_that_was_late_for_longer_costs_more():
    little = less(full_shares(7), *late_load(MS * 21 // 10))
    more = less(full_shares(7), *late_load(MS * 25 // 10))
    assert little is not None and more is not None
    assert 1.0 > little["h2d"][0] > more["h2d"][0]
    assert little["h2d"][2:] == more["h2d"][2:] == (1.0,) * 5


def test_shares_sink_no_lower_than_the_least():
    shares = full_shares(7)
    for _ in range(10):
        found = less(shares, *late_load(20 * MS))
        if found is None:  # there is nothing left to take
            break
        assert all(
            LEAST <= new <= old
            for way in shares
            for new, old in zip(found[way], shares[way], strict=True)
        )
        shares = found
    assert shares["h2d"] == (LEAST, LEAST, *[1.0] * 5)
    assert shares["d2h"] == (1.0,) * 7


@pytest.mark.parametrize(("late_rounds", "times"), [([2], 1), ([1, 2], 2), ([1, 2, 3], 3)])
def test_the_round_that_stands_for_the_middle_ones_loses_their_mean(late_rounds, times):
    """Of five rounds, compute waits in some of the three middle ones, as long in each."""
    few, many = (lower(small("tiny"), rounds_of(number)) for number in (3, 5))
    ops, spans, now = [], [], 0
    late = {many.tasks[many.round_starts[number] + 1].task_id for number in late_rounds}
    for task in many.tasks:
        if task.task_id in late:  # a tenth of the time that the load takes
            ops.append(op(f"load {task.task_id}", "h2d"))
            spans.append((now - MS + 1, now + MS // 9))
            now += MS // 9
        waits = (f"load {task.task_id}",) if task.task_id in late else ()
        ops.append(op(task.task_id, "compute", waits))
        spans.append((now, now + MS))
        now += MS
    begins, ends = zip(*spans, strict=True)
    schedule, passed = sketch(ops), PassSpans(start_ns=begins, end_ns=ends)
    views = ChainView(many), ChainView(few)
    found = less_where_waited(full_shares(len(few.tasks)), schedule, passed, views, LIMITS)
    assert found is not None
    assert {i for i, share in enumerate(found["h2d"]) if share < 1} == {few.round_starts[1]}
    assert 1 - found["h2d"][few.round_starts[1]] == pytest.approx(times * 0.13 / 3, rel=1e-3)


def rounds_of(number: int) -> Workload:
    return Workload(seq_len=16, chunk_tokens=32, chunks_per_round=2, rounds_per_step=number)
