"""When ops start, and how many passes it takes to know the step time."""

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.fixed_costs import FixedCosts
from tests.helpers.flat_machine import D2H_PER_NS, FLOP_PER_NS, flat_machine
from tests.helpers.plans import MACHINE, tiny_plans
from tests.helpers.sketches import CALL, feed, op, sketch
from twinstream.hardware_profiles.errors import NoTimeError
from twinstream.schedule.analysis.periodic import LAST_PASSES, MAX_PASSES
from twinstream.schedule.cost import Work
from twinstream.schedule.timeline import Provenance, RankTimeline
from twinstream.simulator.replay import replay, replay_passes, simulate_rank, steady_state

PROVENANCE = Provenance(kind="simulated", where="a clock")


def spans(ops, durations, num_passes=1, wait_ns=0):
    """Per pass, (start, end) of every op."""
    costs = FixedCosts(lambda o: durations[o.op_id], wait_ns)
    return [
        list(zip(found.start_ns, found.end_ns, strict=True))
        for found in replay_passes(sketch(ops), costs, num_passes)
    ]


def timeline(ops, durations, wait_ns=0) -> RankTimeline:
    costs = FixedCosts(lambda o: durations[o.op_id], wait_ns)
    return replay(sketch(ops), costs, PROVENANCE)


# --- one pass


# --- several passes


def test_passes_follow_one_another_without_a_barrier():
    ops = [op("a", "compute"), op("b", "d2h", ("a",))]
    assert spans(ops, {"a": 2, "b": 5}, 3) == [
        [(0, 2), (2, 7)],
        [(2, 4), (7, 12)],
        [(4, 6), (12, 17)],
    ]


# --- the periodic rule


def test_a_step_that_repeats_at_once_has_a_period_of_one_pass():
    ops = [op("load", "h2d", (), ("use",)), op("use", "compute", ("load",))]
    found = timeline(ops, {"load": 30, "use": 12})
    assert (found.step_ns, found.spread_ns, found.period_passes) == (42, 0, 1)
    # the second pass shows it
    assert [p.end_ns for p in found.passes] == [(30, 42), (72, 84)]


# Rings that cross from pass to pass. By hand, c ends at 30, 45, 70, 85, 110, ...: a starts when a
# and d of the pass before have ended (0, 15, 40, 55, 80), b when b and c have (0, 30, 45, 70, 85).
CROSSED = [
    op("a", "compute", (), ("d",)),
    op("c", "compute2", ("a",)),
    op("b", "h2d", (), ("c",)),
    op("d", "d2h", ("b",)),
]
CROSSED_NS = {"a": 15, "c": 15, "b": 5, "d": 5}


def test_a_step_that_repeats_every_other_pass_has_a_period_of_two():
    assert [found[1][1] for found in spans(CROSSED, CROSSED_NS, 5)] == [30, 45, 70, 85, 110]
    found = timeline(CROSSED, CROSSED_NS)
    assert (found.step_ns, found.spread_ns, found.period_passes) == ((15 + 25) / 2, 0, 2)


def test_streams_that_drift_apart_give_mean_and_spread_of_the_last_16_of_32_passes():
    found = timeline([*CROSSED, op("drift", "h2d2")], CROSSED_NS | {"drift": 7})
    steps = [15, 25] * 8
    spread = (sum((step - 20) ** 2 for step in steps) / 16) ** 0.5
    assert (found.step_ns, found.spread_ns, found.period_passes) == (20, spread, None)
    assert found.passes[-1].end_ns[-1] == 32 * 7
    assert (MAX_PASSES, LAST_PASSES) == (32, 16)


def test_only_the_last_passes_count_when_nothing_repeats():
    # what holds `use` back reaches it three passes late: 12 (n - 2) exceeds 10 n from pass 12 on
    ops = [
        op("use", "compute", (), ("x1",)),
        op("x1", "h2d", (), ("x2",)),
        op("x2", "h2d2", (), ("slow",)),
        op("slow", "h2d3"),
        op("drift", "d2h"),
    ]
    durations = {"use": 10, "x1": 0, "x2": 0, "slow": 12, "drift": 1}
    ends = [found[0][1] for found in spans(ops, durations, 32)]
    assert (ends[11] - ends[0], ends[31] - ends[15]) == (11 * 10, 16 * 12)
    found = timeline(ops, durations)
    assert (found.step_ns, found.spread_ns, found.period_passes) == (12, 0, None)


@pytest.mark.parametrize(("latency_ns", "moving_ns"), [(0, 1010), (20, 990), (500, 700)])
def test_no_step_is_shorter_than_what_a_queue_that_falls_behind_takes(latency_ns, moving_ns):
    size = moving_ns * D2H_PER_NS
    ops = [op("a", "compute"), op("late", "d2h"), feed("odd")]
    work = Work(
        unit="matmul", shape=(1,), flops=1000 * FLOP_PER_NS, hbm_bytes=0, launches=1,
        dtype="bfloat16",
    )  # fmt: skip
    calls = {"call": CALL.model_copy(update={"cost": (work,)})}
    machine = flat_machine(launch_latency_ns=number(0), copy_latency_ns=number(latency_ns))
    schedule = sketch(ops, x_bytes=size, calls=calls)
    found = simulate_rank(schedule, machine)
    assert found.period_passes is None, "it never repeats: the copies are ever later"
    assert found.passes[-1].end_ns[0] == 32 * 1000
    step_ns = latency_ns + moving_ns
    assert found.step_ns == steady_state(schedule, machine).step_ns == step_ns
    assert found.utilization["d2h"] == pytest.approx(moving_ns / step_ns)


def test_waiting_for_events_makes_a_queue_fall_behind_too():
    found = timeline([op("a", "compute"), op("late", "d2h", ("a",))], {"a": 10, "late": 8}, 5)
    assert (found.step_ns, found.period_passes) == (8 + 5, None)


def test_the_steady_state_is_that_of_the_timeline():
    ((_, schedule), *_) = tiny_plans("packed", "tiny", "streaming")
    whole, steady = simulate_rank(schedule, MACHINE), steady_state(schedule, MACHINE)
    assert steady.step_ns == whole.step_ns
    assert steady.passes == whole.passes


def test_the_cold_pass_starts_with_empty_streams_and_ends_when_all_have_drained():
    ops = [op("load", "h2d"), op("use", "compute", ("load",)), op("store", "d2h", ("use",))]
    found = timeline(ops, {"load": 10, "use": 20, "store": 30})
    assert found.cold.start_ns == (0, 10, 30)
    assert found.cold_ns == 60
    assert found.step_ns == 30, "compute takes 20, but the copies to the host cannot keep up"


def test_without_compute_the_last_op_of_a_pass_is_its_anchor():
    found = timeline([op("load", "h2d"), op("store", "d2h", ("load",))], {"load": 4, "store": 4})
    assert found.step_ns == 4


@pytest.mark.parametrize("num_ops", [0, 1])
def test_a_schedule_that_takes_no_time_has_no_timeline(num_ops):
    with pytest.raises(NoTimeError):
        timeline([op("a", "compute")][:num_ops] or [op("b", "h2d")], {"a": 0, "b": 0})
