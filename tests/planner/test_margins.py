"""How long bytes are held for offloads: past the end of the pass, into the next."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from tests.helpers.plans import MACHINE
from tests.helpers.relaxed_residencies import sequence_and_residencies
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.planner.decide.margins import Allowances, QueueModel, _trim, alive_bytes
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.residencies import Residency, TaskClock, residency_intervals
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.pack.folded_packing import pack_folded, trimmed
from twinstream.schedule.workload import Workload

WORKLOAD = Workload(seq_len=16, chunk_tokens=32, chunks_per_round=2, rounds_per_step=3)
CHAIN = lower(small("tiny", num_layers=3), WORKLOAD)
VIEW = ChainView(CHAIN)
UNITS = VIEW.units
CALL_NS = VIEW.call_ns(MACHINE)
LONGEST_NS = 4 * max(CALL_NS.values())
SEQUENCE, RESIDENCIES = sequence_and_residencies(VIEW)
NUM_TASKS = len(SEQUENCE.tasks)


def queues(slower: float) -> QueueModel:
    """Links at a fraction of their rate."""
    rates = {f"pcie_{way}_bytes_per_s" for way in ("h2d", "d2h")}
    numbers = {name: getattr(MACHINE, name) for name in rates}
    slow = {n: v.model_copy(update={"value": v.value / slower}) for n, v in numbers.items()}
    return QueueModel(MACHINE.model_copy(update=slow), LONGEST_NS)


def widened(slower: float, most_bytes: int | None = None) -> list[Residency]:
    return (
        queues(slower).allowances(SEQUENCE, RESIDENCIES, most_bytes).widened(SEQUENCE, RESIDENCIES)
    )


def test_positions_after_a_task_go_on_in_the_pass_after():
    clock = TaskClock([10.0, 20.0, 30.0])
    assert [clock.position_after(2, ns) for ns in (0.0, 1.0, 10.0, 11.0, 30.0, 60.0)] == [
        3, 4, 4, 5, 5, 6,
    ]  # fmt: skip
    assert clock.position_after(0, 50.0) == 3
    assert clock.position_after(0, 51.0) == 4
    assert clock.position_after(2, 1e9) == 6, "no later than where that ends"


def test_offloads_that_outlast_the_pass_hold_their_bytes_in_the_next():
    slow = widened(30.0)
    held = [residency for residency in slow if residency.later]
    assert len(held) > 2
    assert all(
        residency.end == NUM_TASKS and residency.ranges[1] == (0, residency.later)
        for residency in held
    )
    held_for = [
        sum(residency.later for residency in widened(slower)) for slower in (0.01, 30.0, 60.0)
    ]
    assert held_for == sorted(set(held_for))


def test_the_queue_goes_on_with_what_the_pass_before_left():
    """Those of the first tasks wait for those of the last ones, so that they take longer."""
    sequence = replace(SEQUENCE, clock=TaskClock([1000.0] * NUM_TASKS))
    first, last = Residency("a", 0, 1, ()), Residency("a", NUM_TASKS - 1, NUM_TASKS, ())
    model = QueueModel(queues(1.0).machine, 1e9)
    name = next(name for name, unit in UNITS.units.items() if unit.tensor.size_bytes > 1000)
    leaf = UNITS.units[name].leaves[0]
    first, last = replace(first, unit=name), replace(last, unit=name)
    alone = model._ends(sequence, [first], {0: {0: {leaf: 1}}})
    both = model._ends(sequence, [first, last], {0: {0: {leaf: 1}}, NUM_TASKS - 1: {1: {leaf: 2}}})
    assert both[1] > NUM_TASKS
    assert both[0] > alone[0]


def test_what_is_alive_counts_the_bytes_of_the_pass_before():
    slow = widened(30.0)
    without = alive_bytes(SEQUENCE, [replace(residency, later=0) for residency in slow])
    more = alive_bytes(SEQUENCE, slow) - without
    there = {residency.unit: residency.end for residency in slow if residency.enters}
    sizes = [align_up(UNITS.units[residency.unit].tensor.size_bytes) for residency in slow]
    since = [there[residency.unit] if residency.leaves else 0 for residency in slow]
    expected = [
        sum(size for s, size, start in zip(slow, sizes, since, strict=True) if start <= i < s.later)
        for i in range(NUM_TASKS)
    ]
    assert more.tolist() == expected
    assert max(expected) > 0


@pytest.mark.parametrize(
    ("entered_until", "later", "intervals"),
    [(3, 2, []), (3, 3, []), (3, 5, [(3, 5)]), (None, 2, [(0, 2)])],
)
def test_what_stays_for_the_next_pass_and_is_copied_there_has_its_bytes_once(
    entered_until, later, intervals
):
    name, unit = next(iter(UNITS.units.items()))
    leaving = Residency(name, 7, 9, (), leaves=entered_until is not None, later=later)
    entering = [] if entered_until is None else [Residency(name, 0, entered_until, (), enters=True)]
    expected = [*((0, entered_until) for _ in entering), (7, 9), *intervals]
    size_bytes = unit.tensor.size_bytes
    residencies = [*entering, leaving]
    assert residency_intervals(UNITS, residencies) == [(*span, size_bytes) for span in expected]
    there = {task for low, high in expected for task in range(low, high)}
    alive = alive_bytes(SEQUENCE, residencies).tolist()
    assert alive == [align_up(size_bytes) * (task in there) for task in range(NUM_TASKS)]


def test_where_too_much_is_alive_bytes_of_the_pass_before_go_first():
    slow = widened(30.0)
    begins = np.asarray([residency.begin for residency in slow])
    ends = np.asarray([residency.end + residency.later for residency in slow])
    held = sorted((s.later, align_up(UNITS.units[s.unit].tensor.size_bytes)) for s in slow)
    first_task = sum(size for later, size in held if later > 0)
    bare = [replace(s, begin=s.uses[0].position, end=s.uses[-1].position + 1) for s in slow]
    for too_much in (1, first_task):
        cut_begins, cut_ends = begins.copy(), ends.copy()
        excess = np.zeros(NUM_TASKS, dtype=np.int64)
        excess[0] = too_much
        _trim(SEQUENCE, bare, cut_begins, cut_ends, excess)
        assert excess.max() <= 0
        assert cut_begins.tolist() == begins.tolist()
        assert [
            e for e, was in zip(cut_ends, ends, strict=True) if e != was and e != NUM_TASKS
        ] == []
        ended = np.count_nonzero(cut_ends != ends)
        assert ended == (1 if too_much == 1 else sum(later > 0 for later, _ in held))


@pytest.mark.parametrize("cap", [None, 230_000, 300_000])
def test_what_outlasts_the_pass_shares_its_bytes_with_nothing_there(cap):
    found = pack_folded(widened(30.0), UNITS, SEQUENCE.folding, cap)
    placed = list(zip(found.residencies, found.offsets, strict=True))
    assert any(residency.later for residency in found.residencies)
    for (one, low), (other, other_low) in combinations(placed, 2):
        meet = any(a < d and c < b for a, b in one.ranges for c, d in other.ranges)
        if meet and one.unit != other.unit:
            size, other_size = (UNITS.units[s.unit].tensor.size_bytes for s in (one, other))
            assert low + size <= other_low or other_low + other_size <= low


def test_a_residency_at_a_share_of_its_time_first_gives_up_what_lies_in_the_pass_after():
    uses = RESIDENCIES[-1].uses[-1:]
    last = uses[0].position + 1
    residency = Residency("x", last - 1, last + 6, uses, later=4)
    assert trimmed(residency, 1.0) is residency
    assert trimmed(residency, 0.7) == Residency("x", last - 1, last + 6, uses, later=1)
    assert trimmed(residency, 0.5) == Residency("x", last - 1, last + 5, uses)
    stays_there = replace(residency, leaves=True)
    assert trimmed(stays_there, 0.7) == replace(stays_there, later=1)
    assert trimmed(stays_there, 0.0) == replace(stays_there, later=0)


def test_residencies_that_meet_are_joined_with_what_the_last_holds_in_the_pass_after():
    """All time there is for every copy: what is read again before it is gone stays."""
    always = {(s.unit, SEQUENCE.place(s.uses[-1].position)): NUM_TASKS for s in RESIDENCIES}
    found = Allowances({}, always).widened(SEQUENCE, RESIDENCIES)
    assert len(found) < len(RESIDENCIES)
    last_of = {residency.unit: residency for residency in RESIDENCIES}
    for residency in found:
        end = residency.uses[-1].position + 1
        if last_of[residency.unit].uses[-1] == residency.uses[-1]:
            assert (residency.end, residency.later) == (
                NUM_TASKS,
                NUM_TASKS - (NUM_TASKS - last_of[residency.unit].end),
            )
        else:
            assert residency.later == 0
            assert residency.end >= end
