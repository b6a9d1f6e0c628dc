"""What copies did not take of the time reserved for them is memory for others."""

from functools import cache
from itertools import accumulate
from math import ceil

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.planner.choices import OPEN
from twinstream.planner.decide.decider import Candidate, Decider
from twinstream.planner.decide.margins import alive_bytes
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.search.congestion import full_shares
from twinstream.planner.search.timed import judged_clock, timed_allowances, timed_stays
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import PassSpans
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

KIB = 1024
WORKLOAD = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=1, rounds_per_step=4)
CHAIN = lower(small("tiny", num_layers=4), WORKLOAD)
SLOW = MACHINE.model_copy(update={f"pcie_{way}_bytes_per_s": number(3e8) for way in ("h2d", "d2h")})


@cache
def decider(device_kib: int) -> Decider:
    return Decider(CHAIN, SLOW, Caps(device_bytes=device_kib * KIB), num_rounds=4)


@cache
def decided(device_kib: int) -> tuple[Candidate, Emitted]:
    mine = decider(device_kib)
    found = mine.fitting(OPEN, mine.in_flight() // 3, full_shares(len(mine.small.tasks)))
    assert found is not None
    candidate, placement = found
    return candidate, emitted(placement, SLOW, mine.caps, "optimal")


def just_in_time(made: Emitted) -> PassSpans:
    """Tasks of 10 ns without a pause; copies take none, loads just before their op."""
    ops, now, start, end = made.schedule.ops, 0, [], []
    for op in ops:
        length = 10 if isinstance(op, Compute) else 0
        start.append(now)
        now += length
        end.append(now)
    needed = {name: i for i, op in reversed(list(enumerate(ops))) for name in op.waits}
    for i, op in enumerate(ops):
        if isinstance(op, Copy) and op.op_id in needed:
            start[i] = end[i] = start[needed[op.op_id]]
    return PassSpans(start_ns=tuple(start), end_ns=tuple(end))


def even(made: Emitted, task_ns: int) -> tuple[PassSpans, float]:
    """Tasks of the same length without a pause, and of all of them; copies take none."""
    lengths = [task_ns if isinstance(op, Compute) else 0 for op in made.schedule.ops]
    ends = list(accumulate(lengths))
    return PassSpans(start_ns=(0, *ends[:-1]), end_ns=tuple(ends)), ends[-1]


@pytest.mark.parametrize("device_kib", [500, 600, 700])
def test_timed_stays_are_never_longer_and_have_all_their_uses(device_kib):
    _, made = decided(device_kib)
    placement = made.placement
    judged = simulate(made.schedule, SLOW)
    timed = timed_stays(made, judged.passes[-1], judged.step_ns)
    assert len(timed) == len(placement.stays)
    for stay, was in zip(timed, placement.stays, strict=True):
        assert (stay.unit, stay.uses, stay.enters) == (was.unit, was.uses, was.enters)
        assert was.begin <= stay.begin <= stay.uses[0].position
        assert stay.uses[-1].position < stay.end <= was.end
        assert stay.later <= was.later


@pytest.mark.parametrize("device_kib", [500, 600])
def test_a_load_that_comes_just_in_time_takes_its_bytes_no_earlier(device_kib):
    _, made = decided(device_kib)
    placement = made.placement
    loaded = {made.stay_of_copy[op.op_id] for op in made.schedule.ops if op.op_id.startswith("h2d")}
    late = timed_stays(made, just_in_time(made), 1e9)
    early = [i for i in loaded if placement.stays[i].begin < placement.stays[i].uses[0].position]
    assert len(early) > 3
    later = [i for i in early if late[i].begin > placement.stays[i].begin]
    assert len(later) > len(early) / 3


@pytest.mark.parametrize("device_kib", [500, 600, 700])
def test_what_is_packed_again_is_safe_and_takes_no_more(device_kib):
    mine = decider(device_kib)
    candidate, made = decided(device_kib)
    spans = just_in_time(made)
    found = next(mine.tightened(candidate, made, spans, max(spans.end_ns)), None)
    call_ns = dict.fromkeys(mine.judged.calls, 1.0)
    sequence = TaskSequence.of(mine.judged, UnitMap(mine.judged), candidate.decisions, call_ns)
    timed = alive_bytes(sequence, timed_stays(made, spans, max(spans.end_ns))).max()
    wasteful = arena_bytes(made.schedule, DEVICE) > 1.03 * timed
    assert (found is not None) == wasteful
    if found is not None:
        schedule = emitted(found[1], SLOW, mine.caps, "optimal").schedule
        assert verify(schedule) == []
        assert conforms(schedule, CHAIN) == []
        assert arena_bytes(schedule, DEVICE) < arena_bytes(made.schedule, DEVICE)


@pytest.mark.parametrize("late", [0.0, 0.5, 1.5, 9.0])
def test_an_offload_holds_its_bytes_in_the_pass_after_until_it_is_through(late):
    """All offloads of the last task end so many tasks into the next pass."""
    candidate, made = decided(600)
    stays, num_tasks = made.placement.stays, len(made.placement.tasks)
    spans, pass_ns = even(made, 100)
    held = {i: stay for i, stay in enumerate(stays) if stay.later}
    ends = list(spans.end_ns)
    for i, op in enumerate(made.schedule.ops):
        if op.op_id.startswith("d2h") and made.stay_of_copy[op.op_id] in held:
            ends[i] = round(pass_ns + 100 * late)
    spans = spans.model_copy(update={"end_ns": tuple(ends)})
    timed = timed_stays(made, spans, pass_ns)
    assert len(held) > 3
    for i, stay in held.items():
        assert timed[i].later == min(stay.later, ceil(late))
    sequence = TaskSequence.of(
        CHAIN, UnitMap(CHAIN), candidate.decisions, dict.fromkeys(CHAIN.calls, 1.0)
    )
    allowed = timed_allowances(candidate.allowances, sequence, timed).drains
    for i, stay in held.items():
        last = stay.uses[-1].position
        drain = allowed[stay.unit, sequence.place(last)]
        assert drain == num_tasks - last - 1 + timed[i].later


@pytest.mark.parametrize("outlasting", [True, False])
def test_offloads_outlast_the_pass_only_if_they_may(outlasting):
    mine = Decider(CHAIN, SLOW, Caps(device_bytes=600 * KIB), num_rounds=4, outlasting=outlasting)
    found = mine.fitting(OPEN, mine.in_flight() // 3, full_shares(len(mine.small.tasks)))
    assert found is not None
    assert any(stay.later for stay in found[1].stays) == outlasting


def test_the_judged_clock_has_the_starts_of_all_tasks_and_of_the_pass_after():
    _, made = decided(500)
    judged = simulate(made.schedule, SLOW)
    spans = judged.passes[-1]
    computes = [i for i, op in enumerate(made.schedule.ops) if isinstance(op, Compute)]
    first_ns = spans.start_ns[computes[0]]
    clock = judged_clock(made.schedule, spans, judged.step_ns)
    expected = [spans.start_ns[i] - first_ns for i in computes]
    assert clock.start_ns == pytest.approx([*expected, judged.step_ns])


@pytest.mark.parametrize("device_kib", [500, 600, 700])
def test_where_tasks_took_longer_copies_get_fewer_of_them(device_kib):
    mine = decider(device_kib)
    candidate, made = decided(device_kib)
    slow = mine.reclocked(candidate, made, *even(made, 10_000_000))
    assert slow is not None
    assert all(lead <= 1 for lead in slow[0].allowances.leads.values())
    assert sum(slow[0].allowances.leads.values()) < sum(candidate.allowances.leads.values())
    schedule = emitted(slow[1], SLOW, mine.caps, "optimal").schedule
    assert slow[0].decisions is candidate.decisions
    assert verify(schedule) == []
    assert conforms(schedule, CHAIN) == []
    assert arena_bytes(schedule, DEVICE) <= device_kib * KIB


@pytest.mark.parametrize("device_kib", [800, 900])
def test_where_tasks_took_no_time_copies_get_more_of_them(device_kib):
    candidate, made = decided(device_kib)
    fast = decider(device_kib).reclocked(candidate, made, *even(made, 100))
    assert fast is not None
    assert sum(fast[0].allowances.leads.values()) > sum(candidate.allowances.leads.values())


def test_what_cannot_be_packed_with_its_time_as_judged_is_no_plan():
    candidate, made = decided(600)
    assert decider(600).reclocked(candidate, made, *even(made, 10_000_000)) is not None
    assert decider(600).reclocked(candidate, made, *even(made, 1000)) is None


def test_what_then_needs_more_homes_than_the_host_has_is_no_plan():
    """Less time for copies: content that stayed between two uses is copied, and needs a home."""
    candidate, made = decided(800)
    joined, apart = (
        decider(800).reclocked(candidate, made, *even(made, task_ns))
        for task_ns in (1000, 10_000_000)
    )
    assert joined is not None
    assert apart is not None
    host = joined[1].host_bytes
    assert host < apart[1].host_bytes
    tight = Decider(CHAIN, SLOW, Caps(device_bytes=800 * KIB, host_bytes=host), num_rounds=4)
    assert tight.reclocked(candidate, made, *even(made, 1000)) is not None
    assert tight.reclocked(candidate, made, *even(made, 10_000_000)) is None


def test_some_of_these_plans_waste_memory():
    found = [
        list(decider(kib).tightened(*decided(kib), just_in_time(decided(kib)[1]), 1e9)) != []
        for kib in (500, 600, 700)
    ]
    assert True in found
