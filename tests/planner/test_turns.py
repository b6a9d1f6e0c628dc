"""Which room for copies and which shares of the links a search goes through."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from twinstream.planner.choices import OPEN
from twinstream.planner.search import turns as turns_module
from twinstream.planner.search.congestion import Shares
from twinstream.planner.search.judged_plan import Plan, tightest
from twinstream.planner.search.turns import Turns

GIB = 2**30
FULL, LESS, LEAST = ({"h2d": [share], "d2h": [share]} for share in (1.0, 0.5, 0.25))
LOWERED = {1.0: LESS, 0.5: LEAST, 0.25: None}

# By room in GiB and share of the links: seconds by the program, and as judged; else nothing fits.
Landscape = Mapping[tuple[float, float], tuple[float, float]]


class Where(tuple[float, float]):
    """A place in a landscape, with what the program's decisions come to there."""

    decisions = SimpleNamespace(step_s=1.0)


@dataclass
class FakeDecider:
    """Says what a landscape has; a schedule, a placement and a candidate are where that is."""

    landscape: Landscape
    asked: list[tuple[float, float]] = field(default_factory=list)
    ways: tuple[str, ...] = ()
    again: Mapping[object, tuple[str, ...]] = field(default_factory=dict)
    num_tasks: int = 1000
    num_rounds: int = 1
    machine = caps = None

    @property
    def small(self) -> Any:
        return SimpleNamespace(tasks=[None] * self.num_tasks)

    judged = small

    def fitting(
        self, choices: object, room: int, shares: Shares, wanted: Callable[[float], bool]
    ) -> Any:
        at = Where((round(room / GIB, 3), shares["h2d"][0]))
        self.asked.append(at)
        found = self.landscape.get(at)
        if found is None:
            return None
        if not wanted(found[0]):
            raise turns_module.NotWanted
        at.decisions = SimpleNamespace(step_s=found[0])
        return at, SimpleNamespace(at=at, same_as=lambda other: other.at == at)

    def tightened(self, *_: object) -> Iterator[Any]:
        return ((Where((way,)), SimpleNamespace(at=(way,))) for way in self.ways)

    def reclocked(self, candidate: Where, *_: object) -> Any:
        """What comes after a place, if anything does."""
        named = self.again.get(candidate)
        if named is None:
            return None
        way = Where(named)
        way.decisions = candidate.decisions
        return way, SimpleNamespace(at=way, same_as=lambda other: other.at == way)

    def schedule(self, candidate: object, judged: Any, chain: object) -> object:
        assert judged.schedule == candidate, "what was judged is of the same decisions"
        return candidate


def taken(
    monkeypatch: pytest.MonkeyPatch,
    landscape: Landscape,
    most: int = 3,
    beat_s: float = inf,
    **told: Any,
) -> tuple[Turns, list[tuple[float, float]]]:
    """Turns with rooms of 3 and 1 GiB and none, and what they asked for."""
    decider = FakeDecider(landscape, **told)
    monkeypatch.setattr(
        turns_module,
        "emitted",
        lambda placement, *_: SimpleNamespace(schedule=placement.at, placement=placement),
    )
    monkeypatch.setattr(turns_module, "step_ns", lambda at, *_: landscape[at][1] * 1e9)
    monkeypatch.setattr(
        turns_module, "lowered", lambda shares, *_: LOWERED.get(shares["h2d"][0], LESS)
    )
    monkeypatch.setattr(turns_module, "arena_bytes", lambda at, _: 8 if at == ("tight",) else 9)
    turns = Turns(
        decider, lambda _: SimpleNamespace(passes=[None], step_ns=1.0), OPEN, False, 1e9,  # type: ignore[arg-type]
        beat_s * 1e9, most, FULL, [3 * GIB, GIB, 0],
    )  # fmt: skip
    turns.take()
    return turns, decider.asked


def test_where_copies_are_waited_for_the_links_get_less(monkeypatch):
    landscape = {(3, 1): (1.02, 1.2), (3, 0.5): (1.03, 1.1), (3, 0.25): (1.05, 1.15)}
    turns, asked = taken(monkeypatch, landscape)
    assert asked == [(3, 1), (3, 0.5), (3, 0.25), (6, 0.25)]
    assert (turns.rooms[0], turns.shares) == (3 * GIB, LESS)


def test_where_the_room_for_copies_costs_more_than_waits_a_third_of_it_is_tried(monkeypatch):
    landscape = {(3, 1): (1.035, 1.036), (1, 1): (1.03, 1.031), (0.333, 1): (1.02, 1.3)}
    turns, asked = taken(monkeypatch, landscape)
    assert asked == [(3, 1), (1, 1), (0.333, 1)]
    assert (turns.rooms[0], turns.shares) == (GIB, FULL)


def test_what_very_bad_decisions_were_made_with_is_nothing_to_begin_with(monkeypatch):
    landscape = {(3, 1): (1.2, 1.21), (1, 1): (1.1, 1.4), (3, 0.5): (1.19, 1.2)}
    turns, asked = taken(monkeypatch, landscape)
    assert asked == [(3, 1), (1, 1), (3, 0.5), (1, 0.5)]
    assert (turns.rooms, turns.shares) == ([3 * GIB, GIB, 0], FULL)


def test_where_less_room_was_worse_the_links_get_less_with_the_room_of_before(monkeypatch):
    landscape = {(3, 1): (1.035, 1.036), (1, 1): (1.03, 1.2), (3, 0.5): (1.034, 1.0355)}
    turns, asked = taken(monkeypatch, landscape)
    assert asked == [(3, 1), (1, 1), (3, 0.5)]
    assert (turns.rooms[0], turns.shares) == (3 * GIB, LESS)


def test_where_waits_cost_more_than_the_room_for_copies_twice_the_room_is_tried(monkeypatch):
    """While that helps, and with what the links were left with by the best turn."""
    landscape = {(3, 1): (1.02, 1.2), (3, 0.5): (1.03, 1.3), (3, 0.25): (1.05, 1.4)}
    turns, asked = taken(monkeypatch, {**landscape, (6, 0.5): (1.04, 1.1), (6, 0.25): (1.05, 1.09)})
    assert asked == [(3, 1), (3, 0.5), (3, 0.25), (6, 0.5), (6, 0.25)]
    assert min(turns.found, key=lambda plan: plan.step_ns).step_ns == 1.09e9
    assert (turns.rooms[0], turns.shares) == (3 * GIB, FULL)
    turns, asked = taken(monkeypatch, {**landscape, (6, 0.5): (1.04, 1.25), (6, 0.25): (1.0, 1.0)})
    assert asked == [(3, 1), (3, 0.5), (3, 0.25), (6, 0.5)]
    assert (turns.rooms[0], turns.shares) == (3 * GIB, FULL)


def test_with_a_single_turn_no_more_room_is_tried(monkeypatch):
    _, asked = taken(monkeypatch, {(3, 1): (1.02, 1.2), (6, 0.5): (1.0, 1.0)}, most=1)
    assert asked == [(3, 1)]


def test_where_another_way_to_cut_is_clearly_faster_no_more_room_is_tried(monkeypatch):
    landscape = {(3, 1): (1.02, 1.2), (6, 0.5): (1.0, 1.0)}
    _, asked = taken(monkeypatch, landscape, beat_s=1.03)
    assert asked == [(3, 1)]


USUAL = {(3, 1): (1.02, 1.2), (3, 0.5): (1.03, 1.3), (3, 0.25): (1.05, 1.4)}


def test_of_a_short_chain_more_room_is_tried_then_less_of_the_links_then_what_was_learned(
    monkeypatch,
):
    """Each of these until two in a row are no better; with the room of the best."""
    rooms = {
        (4.5, 1): (1.03, 1.21),
        (6, 1): (1.04, 1.15),
        (9, 1): (1.05, 1.16),
        (12, 1): (1.06, 1.15),
    }
    less = {(6, 0.9): (1.07, 1.18), (6, 0.8): (1.08, 1.14), (6, 0.7): (1.09, 1.17)}
    landscape = USUAL | rooms | less | {(6, 0.6): (1.1, 1.17), (6, 0.5): (1.11, 1.1)}
    turns, asked = taken(monkeypatch, landscape, num_tasks=10)
    assert asked == [*USUAL, *rooms, *less, (6, 0.6), (6, 0.5), (6, 0.25)]
    assert min(plan.step_ns for plan in turns.found) == 1.1e9
    assert (turns.rooms[0], turns.shares) == (3 * GIB, FULL)


def test_a_wider_search_gives_up_what_brings_nothing(monkeypatch):
    landscape = USUAL | {(room, 1): (1.03 + room / 1000, 1.3) for room in (4.5, 6, 9, 12)}
    landscape |= {(3, share): (1.1 + share / 100, 1.3) for share in (0.9, 0.8, 0.7, 0.6)}
    _, asked = taken(monkeypatch, landscape, num_tasks=10)
    assert asked[3:] == [(4.5, 1), (6, 1), (3, 0.9), (3, 0.8)]


def test_a_wider_search_judges_no_more_tasks_than_pay(monkeypatch):
    landscape = USUAL | {(room, 1): (1.03 + room / 1000, 1.2 - room / 1000) for room in (4.5, 6, 9)}
    _, asked = taken(monkeypatch, landscape, num_tasks=320)
    assert len(asked) > 6, "twelve plans of 320 tasks"
    monkeypatch.setattr(turns_module, "_WIDER_TASKS", 640)
    _, asked = taken(monkeypatch, landscape, num_tasks=320)
    assert asked == [*USUAL, (4.5, 1), (6, 1)]
    monkeypatch.setattr(turns_module, "_WIDER_PLANS", 1)
    _, asked = taken(monkeypatch, landscape, num_tasks=10)
    assert asked == [*USUAL, (4.5, 1)]


@pytest.mark.parametrize(
    ("told", "plan_s"),
    [
        ({"num_tasks": 321}, 1.2),
        ({"num_tasks": 10, "num_rounds": 2}, 1.2),
        ({"num_tasks": 10, "most": 1}, 1.2),
        ({"num_tasks": 10}, 1.039),
    ],
    ids=["long", "two rounds", "quick", "near the bound"],
)
def test_a_wider_search_is_for_short_steps_of_one_round_far_from_the_bound(
    monkeypatch, told, plan_s
):
    landscape = {(3, 1): (1.03, plan_s), (4.5, 1): (1.03, 1.0), (3, 0.9): (1.01, 1.0)}
    _, asked = taken(monkeypatch, landscape, **told)
    assert not {(4.5, 1), (3, 0.9)} & set(asked)


def test_in_a_wider_search_copies_get_their_time_as_judged_while_that_helps(monkeypatch):
    again = {(3, 1): ("once",), ("once",): ("twice",), ("twice",): ("no better",)}
    found = {("once",): (1.02, 1.19), ("twice",): (1.02, 1.1), ("no better",): (1.02, 1.0999)}
    turns, _ = taken(monkeypatch, USUAL | found, num_tasks=10, again=again)
    best = min(turns.found, key=lambda plan: plan.step_ns)
    assert best.step_ns == 1.1e9
    assert best.make(None) == ("twice",)
    assert best.tighter is not None


def test_what_has_its_time_as_judged_already_is_not_judged_again(monkeypatch):
    turns, _ = taken(monkeypatch, USUAL, num_tasks=10, again={(3, 1): (3, 1)})
    assert turns._judgements == len(turns.found) == 3


def test_what_came_near_the_bound_is_not_judged_again(monkeypatch):
    landscape = USUAL | {(4.5, 1): (1.03, 1.039), ("once",): (1.03, 1.0)}
    turns, _ = taken(monkeypatch, landscape, num_tasks=10, again={(4.5, 1): ("once",)})
    assert min(plan.step_ns for plan in turns.found) == pytest.approx(1.039e9)


def test_a_wider_search_tries_the_best_plan_in_less_memory(monkeypatch):
    turns, _ = taken(monkeypatch, USUAL | {("tight",): (1.02, 1.05)}, num_tasks=10, ways=("tight",))
    assert min(turns.found, key=lambda plan: plan.step_ns).make(None) == ("tight",)


def test_near_the_bound_no_less_room_is_tried(monkeypatch):
    landscape = {(3, 1): (1.019, 1.02), (3, 0.5): (1.0189, 1.03), (3, 0.25): (1.01, 1.04)}
    _, asked = taken(monkeypatch, landscape)
    assert {room for room, _ in asked} == {3}


@pytest.mark.parametrize(
    ("landscape", "rooms"),
    [
        ({(3, 1): (1.019, 1.0195), (1, 1): (1.005, 1.01)}, {3, 1}),
        ({(3, 1): (1.007, 1.007), (1, 1): (1.005, 1.006)}, {3}),  # near
        ({(3, 1): (1.019, 1.022), (1, 1): (1.005, 1.01)}, {3}),  # some waits
    ],
)
def test_less_room_is_tried_not_far_from_the_bound_if_hardly_anything_waits(
    monkeypatch, landscape, rooms
):
    _, asked = taken(monkeypatch, landscape)
    assert {room for room, _ in asked} == rooms


@pytest.mark.parametrize(
    ("landscape", "most", "turns"),
    [
        ({(3, 1): (1.02, 1.3), (3, 0.5): (1.05, 1.2), (3, 0.25): (1.1, 1.15)}, 2, 3),
        ({(3, 1): (1.02, 1.3), (3, 0.5): (1.05, 1.2), (3, 0.25): (1.1, 1.15)}, 1, 1),  # quick
        ({(3, 1): (1.02, 1.3), (3, 0.5): (1.02, 1.03), (3, 0.25): (1.01, 1.02)}, 2, 2),  # not far
        ({(3, 1): (1.02, 1.2), (3, 0.5): (1.05, 1.3), (3, 0.25): (1.1, 1.15)}, 2, 2),  # no gain
    ],
)
def test_very_far_from_the_bound_there_are_more_turns_while_they_gain(
    monkeypatch, landscape, most, turns
):
    _, asked = taken(monkeypatch, landscape, most=most)
    assert [at for at in asked if at[0] == 3] == [(3, 1), (3, 0.5), (3, 0.25)][:turns]


def test_the_first_room_with_which_anything_fits_is_kept(monkeypatch):
    landscape = {(1, 1): (1.01, 1.2), (1, 0.5): (1.02, 1.03), (1, 0.25): (1.03, 1.2)}
    turns, asked = taken(monkeypatch, landscape)
    assert asked == [(3, 1), (1, 1), (1, 0.5), (1, 0.25)]
    assert turns.rooms == [GIB, 0]


def test_decisions_that_come_to_the_same_time_end_the_turns(monkeypatch):
    landscape = {(3, 1): (1.02, 1.03), (3, 0.5): (1.02, 1.1)}
    turns, asked = taken(monkeypatch, landscape)
    assert asked == [(3, 1), (3, 0.5)]
    assert len(turns.found) == 1


@pytest.mark.parametrize(
    ("judged", "arenas", "wasteful", "chosen"),
    [
        ({"timed": 1.0002, "as it was": 1.0001}, (9, 9, 8), "", "as it was"),  # as fast
        ({"timed": 1.003, "as it was": 1.0004}, (9, 8, 8), "", None),  # too slow for no more
        ({"timed": 1.003, "as it was": 1.004}, (9, 8, 8), "before", "timed"),  # mended
        ({"timed": 1.006, "as it was": 1.006}, (9, 8, 8), "before", None),  # mended, too slow
        ({"timed": 1.0001, "as it was": 1.0}, (9, 8, 9), "before as it was", "timed"),  # smaller
        ({"timed": 1.003, "as it was": 1.003}, (9, 8, 8), "before timed as it was", None),
        ({"timed": 1.003, "as it was": 1.0}, (9, 8, 8), "before as it was", "timed"),  # mended one
    ],
)
def test_memory_is_saved_at_no_cost_and_waste_of_packing_mended_at_little(
    monkeypatch, judged, arenas, wasteful, chosen
):
    before = (3, 1)
    turns, _ = taken(monkeypatch, {before: (1.0, 1.0)}, most=1)
    names = ("timed", "as it was")
    turns.decider.ways = names
    steps = {before: 1.0, **{(name,): step_s for name, step_s in judged.items()}}
    monkeypatch.setattr(turns_module, "step_ns", lambda at, *_: steps[at] * 1e9)
    extents = dict(zip((before, *((name,) for name in names)), arenas, strict=True))
    monkeypatch.setattr(turns_module, "arena_bytes", lambda at, _: extents[at])
    wasted = {before: "before" in wasteful, **{(name,): name in wasteful for name in names}}
    monkeypatch.setattr(turns_module, "wastes", lambda made: wasted[made.schedule])
    tighter = turns.found[0].tighter()
    assert (None if tighter is None else tighter.make(None)) == (chosen and (chosen,))


def test_a_tighter_plan_is_taken_unless_another_policy_is_faster():
    plan = Plan(100.0, fail_to_make, tighter=lambda: Plan(101.0, fail_to_make))
    assert plan.tightened([]).step_ns == 101.0
    assert plan.tightened([theirs(102.0), theirs(101.0)]).step_ns == 101.0
    assert plan.tightened([theirs(102.0), theirs(100.5)]) is plan
    assert plan.tightened([Plan(100.5, fail_to_make)]).step_ns == 101.0
    alone = Plan(100.0, fail_to_make)
    assert alone.tightened([theirs(99.0)]) is alone


@pytest.mark.parametrize(
    ("plans", "chosen_ns"),
    [
        ([("ours wasteful", 100.0), ("ours", 100.3)], 100.3),
        ([("ours wasteful", 100.0), ("ours wasteful", 100.2), ("ours", 100.4)], 100.4),
        ([("ours wasteful", 100.0), ("ours", 100.6)], 100.0),  # too slow
        ([("ours wasteful", 100.0), ("ours wasteful", 100.4)], 100.0),  # no better
        ([("ours wasteful", 100.0), ("theirs", 100.3)], 100.3),
        ([("ours wasteful", 100.0), ("theirs wasteful", 100.1), ("ours", 100.2)], 100.0),  # slower
        ([("ours", 100.0), ("theirs", 100.3)], 100.0),
    ],
)
def test_a_plan_nearly_as_fast_is_taken_where_the_fastest_wastes_memory(plans, chosen_ns):
    made = [
        Plan(ns, fail_to_make, theirs="theirs" in told, wasteful=lambda told=told: "waste" in told)
        for told, ns in plans
    ]
    assert tightest(made).step_ns == chosen_ns


def test_the_next_plan_may_be_tightened_where_the_fastest_cannot():
    def slower(ns: float) -> Plan:
        tight = Plan(1.002 * ns, fail_to_make)
        return Plan(ns, fail_to_make, tighter=lambda: tight, wasteful=lambda: True)

    wasteful = Plan(100.0, fail_to_make, wasteful=lambda: True)
    assert tightest([wasteful, slower(100.1)]).step_ns == pytest.approx(100.3002)
    assert tightest([wasteful, slower(100.4)]) is wasteful  # too slow then


def theirs(step_ns: float) -> Plan:
    return Plan(step_ns, fail_to_make, theirs=True)


def fail_to_make(_chain: object) -> Any:
    raise AssertionError("no schedule is needed")
