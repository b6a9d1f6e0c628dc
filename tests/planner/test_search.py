"""The search: which cuts are planned, with which knobs, each after what came of those before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.planning import cuts_of, plan_step
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.limits import LIMITS, SearchLimits
from twinstream.planner.request import TrainingStep
from twinstream.planner.search import tuning
from twinstream.planner.search.chunking import admissible
from twinstream.planner.search.cuts import Cuts
from twinstream.planner.search.knobs import Attempt, Knobs
from twinstream.planner.search.search import search
from twinstream.planner.search.tuning import fastest, tuning_path
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import steady_state

KIB, MIB = 1024, 2**20
SPEC = small("tiny")
SEVERAL = TrainingStep(seq_len=1024, tokens_per_step=4096)
TIGHT = Caps(device_bytes=6 * MIB)


def simulated_cuts(
    step: TrainingStep, caps: Caps, choices: Choices = OPEN, limits: SearchLimits = LIMITS
) -> tuple[list[Workload], dict[Workload, float]]:
    """The cuts in the order in which they are planned, and the least step time of each, in ns."""
    times: dict[Workload, float] = {}

    def evaluator(schedule, machine):
        result = steady_state(schedule, machine)
        known = times.get(schedule.workload, float("inf"))
        times[schedule.workload] = min(known, result.step_ns)
        return result

    found = search(cuts_of(SPEC, step, MACHINE, caps, choices, limits), evaluator)
    assert found is not None
    return list(times), {**times, "found": found[0].workload}  # type: ignore[dict-item]


# --- which cuts


def test_two_cuts_at_most_are_planned_and_the_faster_is_returned():
    """Of rounds that all are simulated, so that the evaluator's times are those of the step."""
    worth = SearchLimits(near_equal=0.5)
    planned, times = simulated_cuts(SEVERAL, TIGHT, limits=worth)
    assert len(planned) == LIMITS.cuts == 2 < len(admissible(SPEC, SEVERAL))
    assert times["found"] == min(planned, key=times.__getitem__)
    one, _ = simulated_cuts(SEVERAL, TIGHT, limits=SearchLimits(near_equal=0.5, cuts=1))
    assert one == planned[:1]


def test_a_cut_whose_bound_is_not_below_the_best_plan_is_not_planned():
    planned, _ = simulated_cuts(SEVERAL, TIGHT, limits=SearchLimits(near_equal=10.0))
    assert len(planned) == 1


def test_quick_effort_plans_one_cut_and_simulates_it_once_for_each_memory():
    asked = []

    def evaluator(schedule, machine):
        asked.append((schedule.workload, schedule.caps.device_bytes))
        return steady_state(schedule, machine)

    plan_step(SPEC, SEVERAL, MACHINE, TIGHT, choices=Choices(effort="quick"), evaluator=evaluator)
    assert len(asked) == len(set(asked)) and len({workload for workload, _ in asked}) == 1
    assert asked[0][1] == TIGHT.device_bytes


def test_a_quick_plan_is_never_slower_with_more_memory():
    """By itself the plan of 6 MiB is 0.3 % slower than that of 5 MiB."""
    quick = Choices(effort="quick")
    times = []
    for size in (4, 5, 6, 8):
        caps = Caps(device_bytes=size * MIB)
        schedule = plan_step(SPEC, SEVERAL, MACHINE, caps, choices=quick)
        assert schedule.caps.device_bytes == size * MIB
        times.append(steady_state(schedule, MACHINE).step_ns)
    assert times == sorted(times, reverse=True)


def test_where_no_usual_cut_fits_smaller_chunks_are_tried():
    step = TrainingStep(seq_len=64, tokens_per_step=512)
    caps = Caps(device_bytes=400 * KIB)
    usual = {workload.chunk_tokens for workload in admissible(SPEC, step)}
    found = search(cuts_of(SPEC, step, MACHINE, caps), steady_state)
    assert found is not None
    schedule, chain = found
    assert schedule.workload == chain.workload
    assert schedule.workload.chunk_tokens < min(usual)


def test_where_nothing_fits_nothing_is_found():
    step = TrainingStep(seq_len=64, tokens_per_step=512)
    assert search(cuts_of(SPEC, step, MACHINE, Caps(device_bytes=100 * KIB)), steady_state) is None


# --- which knobs

BOUND_S, ROOM = 1.0, 64 * MIB
WORKLOAD = Workload(seq_len=8, chunk_tokens=8, chunks_per_round=1, rounds_per_step=9)
FIXED = Choices(homes={"activation": "device"})  # no state at home on the host


@dataclass
class ScriptedCutPlanner:
    """A cut of many rounds on which decisions and plans take what the test says.

    `decided_s` says what the decisions of knobs come to, `simulated_s` what their plan takes.
    """

    decided_s: Callable[[Knobs], float]
    simulated_s: Callable[[Knobs], float]
    choices: Choices = FIXED
    num_rounds: int = 9
    limits: SearchLimits = LIMITS
    fits: Callable[[Knobs], bool] = lambda knobs: True
    holds_all_state: bool = False
    full_shares: dict[str, tuple[float, ...]] = field(
        default_factory=lambda: dict.fromkeys(("h2d", "d2h"), (1.0,))
    )

    @property
    def cuts(self) -> Any:
        return SimpleNamespace(limits=self.limits, choices=self.choices, is_frozen=False)

    cut = SimpleNamespace(bound=SimpleNamespace(step_s=BOUND_S))
    few = small = SimpleNamespace(
        chain=SimpleNamespace(tasks=[None]), begins_with_updates=False, made_on_host={}
    )

    def room_bytes(self) -> int:
        return ROOM

    def first_knobs(self, choices: Choices, room_bytes: int) -> Knobs:
        return Knobs(choices, room_bytes, self.full_shares)

    def attempts(self, best: Attempt | None = None) -> list[Attempt]:
        """What comes of the path."""
        tried: list[Attempt] = []
        for knobs in tuning_path(self, tried, best):  # type: ignore[arg-type]
            tried.append(self.attempt(knobs))
            assert len(tried) < 50
        return tried

    def attempt(self, knobs: Knobs) -> Attempt:
        if not self.fits(knobs):
            return Attempt(WORKLOAD, knobs)
        relaxed: Any = SimpleNamespace(step_s=self.decided_s(knobs))
        emitted = SimpleNamespace(schedule=None)
        simulated: Any = SimpleNamespace(
            step_ns=self.simulated_s(knobs) * 1e9, emitted=emitted, spans=None
        )
        return Attempt(WORKLOAD, knobs, relaxed, None, simulated)


@pytest.fixture(autouse=True)
def stalls(monkeypatch) -> Iterator[None]:
    """After every plan the links get an eighth less, down to a half."""

    def less(shares, *_):
        found = {way: tuple(max(0.5, s - 0.125) for s in of) for way, of in shares.items()}
        return None if found == shares else found

    monkeypatch.setattr(tuning, "less_where_waited", less)
    yield


def rooms(tried: list[Attempt]) -> list[int]:
    return [attempt.knobs.room_bytes for attempt in tried]


def shares(tried: list[Attempt]) -> list[float]:
    return [round(attempt.knobs.shares["h2d"][0], 6) for attempt in tried]


def test_a_plan_near_the_bound_is_the_last():
    planner = ScriptedCutPlanner(decided_s=lambda _: 1.0, simulated_s=lambda _: LIMITS.near)
    assert len(planner.attempts()) == 1


def test_room_falls_where_it_costs_more_than_waits_do():
    """Decisions are slower the more room is left, and copies are never late."""

    def taken_s(knobs: Knobs) -> float:
        return 1.01 + 0.02 * knobs.room_bytes / ROOM

    tried = ScriptedCutPlanner(decided_s=taken_s, simulated_s=taken_s).attempts()
    assert rooms(tried) == [ROOM, ROOM // 3, ROOM // 9]
    assert shares(tried) == [1.0] * 3
    assert fastest(tried) is tried[-1]


def test_the_links_get_less_where_compute_waited():
    def simulated_s(knobs: Knobs) -> float:
        return 1.02 - 0.005 * (1.0 - knobs.shares["h2d"][0])

    tried = ScriptedCutPlanner(decided_s=lambda _: 1.0, simulated_s=simulated_s).attempts()
    assert rooms(tried) == [ROOM] * LIMITS.turns
    assert shares(tried) == [1.0, 0.875, 0.75]


def test_far_from_the_bound_more_turns_are_taken_while_they_gain():
    def simulated_s(knobs: Knobs) -> float:
        return 1.2 + 0.1 * knobs.shares["h2d"][0]

    tried = ScriptedCutPlanner(decided_s=lambda _: 1.0, simulated_s=simulated_s).attempts()
    assert len(tried) > LIMITS.turns
    assert shares(tried) == [1.0, 0.875, 0.75, 0.625, 0.5]


def test_less_room_is_tried_until_something_fits_and_offloads_that_end_with_the_step_at_last():
    planner = ScriptedCutPlanner(
        lambda _: 1.0, lambda _: 1.0, fits=lambda knobs: knobs.room_bytes == 0
    )
    assert rooms(planner.attempts()) == [ROOM, ROOM // 3, 0]
    planner = ScriptedCutPlanner(lambda _: 1.0, lambda _: 1.0, fits=lambda _: False)
    assert rooms(planner.attempts()) == [ROOM, ROOM // 3, 0]


def test_a_quick_search_stops_at_the_first_plan():
    planner = ScriptedCutPlanner(
        lambda _: 1.0, lambda _: 2.0, choices=replace(FIXED, effort="quick")
    )
    assert len(planner.attempts()) == 1


def test_a_quick_search_leaves_state_on_the_device_only_where_that_is_near_the_bound():
    quick = Choices(effort="quick")
    by_rule = ScriptedCutPlanner(
        lambda _: 1.0, lambda _: 1.0, choices=quick, holds_all_state=True
    ).attempts()
    assert [attempt.knobs.rule is not None for attempt in by_rule] == [True]
    far = ScriptedCutPlanner(
        lambda _: 1.0, lambda knobs: 1.2 if knobs.rule else 1.1, choices=quick, holds_all_state=True
    )
    assert [attempt.knobs.rule is not None for attempt in far.attempts()] == [True, True, False]


def test_a_cut_far_behind_the_best_is_left_and_begins_with_the_room_that_was_best():
    other = ScriptedCutPlanner(lambda _: 1.0, lambda _: 1.0)
    best = other.attempt(other.first_knobs(other.choices, ROOM // 3))
    behind = ScriptedCutPlanner(lambda _: 1.0, lambda _: 1.03).attempts(best)
    assert rooms(behind) == [ROOM // 3]
    near = ScriptedCutPlanner(lambda _: 1.0, lambda _: 1.01).attempts(best)
    assert len(near) == LIMITS.turns


def test_a_short_step_far_from_the_bound_is_searched_more_widely():
    """With ever more room, then with ever less of the links; until so many tasks were simulated."""
    planner = ScriptedCutPlanner(decided_s=lambda _: 1.19, simulated_s=lambda _: 1.2, num_rounds=1)
    tried = planner.attempts()
    assert {round(times * ROOM) for times in LIMITS.wider_rooms} <= set(rooms(tried))
    assert set(LIMITS.wider_shares) <= set(shares(tried))
    few = replace(planner, limits=SearchLimits(wider_tasks=2)).attempts()
    assert len(few) < len(tried)
    assert len(replace(planner, num_rounds=2).attempts()) < len(few)


def test_cuts_share_what_the_limits_say():
    cuts = cuts_of(SPEC, SEVERAL, MACHINE, TIGHT, limits=SearchLimits(chunk_tokens=512))
    assert isinstance(cuts, Cuts)
    usual = cuts_of(SPEC, SEVERAL, MACHINE, TIGHT).usual
    assert {cut.workload.chunk_tokens for cut in cuts.usual} != {
        cut.workload.chunk_tokens for cut in usual
    }
