"""With which choices a search decides: state anywhere, or all of it at home on the host."""

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.planner.bound.lower_bound import BoundProgram, LowerBound
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.decide.decider import Decider
from twinstream.planner.search import optimal
from twinstream.planner.search.congestion import full_shares
from twinstream.planner.search.judged_plan import Plan
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

KIB = 1024
CHAIN = lower(
    small("tiny"), Workload(seq_len=16, chunk_tokens=16, chunks_per_round=1, rounds_per_step=4)
)
CAPS = Caps(device_bytes=800 * KIB)
BOUND_NS = 1e9
FIXED = Choices(recompute="none")


class FakeTurns:
    """Turns that find one plan, and learn from it unless they have nothing to."""

    def __init__(self, plan_s: float | None, *, learns: bool, shares: Any, rooms: Any) -> None:
        self.found = [] if plan_s is None else [Plan(plan_s * 1e9, lambda _: None)]  # type: ignore[arg-type, return-value]
        self.shares = {"h2d": [0.5]} if learns else shares
        self.rooms = rooms


def taken(  # noqa: PLR0913
    monkeypatch: pytest.MonkeyPatch,
    costs: float,
    plans_s: dict[str, float | None],
    *,
    learns: bool = True,
    beat_ns: float = inf,
    choices: Choices = OPEN,
    fits: Sequence[float] = (inf, inf),
    hoped_s: float = 1.015,
) -> list[str]:
    """The ways that a search goes; `costs` is what it costs to have all state at home.

    The program's decisions come to `hoped_s`.
    The program finds nothing with more room for copies than `fits`, anywhere and at home.
    """
    asked: list[str] = []

    def turns_of(self: Any, choices: Choices, *given: Any) -> FakeTurns:
        way = "home" if choices.homes else "anywhere"
        fresh = given[2] == full_shares(len(self.small.tasks))
        asked.append(way if fresh else f"{way}, learned")
        return FakeTurns(plans_s[way], learns=learns, shares=given[2], rooms=given[3])

    def decided_s(_: Decider, choices: Choices, room: int, *__: object) -> float:
        if room > fits[bool(choices.homes)]:
            return inf
        return hoped_s * (1.0 + costs) if choices.homes else hoped_s

    monkeypatch.setattr(optimal._Search, "_turns_of", turns_of)
    monkeypatch.setattr(Decider, "decided_s", decided_s)
    monkeypatch.setattr(Decider, "in_flight", lambda _: 90)
    search = optimal._Search(CHAIN, MACHINE, CAPS, lambda _: None, choices, 4)  # type: ignore[arg-type, return-value]
    search._turns(beat_ns, BOUND_NS)
    return asked


def test_state_is_at_home_at_once_where_that_costs_next_to_nothing(monkeypatch):
    near: dict[str, float | None] = {"home": 1.015, "anywhere": 1.015}
    assert taken(monkeypatch, 0.001, near) == ["home"]
    assert taken(monkeypatch, -0.1, near) == ["home"]
    assert taken(monkeypatch, 0.002, near) == ["anywhere"]
    assert taken(monkeypatch, inf, near) == ["anywhere"]


def test_the_other_is_tried_where_plans_are_slower_than_what_the_program_decided(monkeypatch):
    near: dict[str, float | None] = {"home": 1.009, "anywhere": 1.009}
    assert taken(monkeypatch, 0.0, near, hoped_s=1.004) == ["home", "anywhere", "home, learned"]
    assert taken(monkeypatch, 0.0, near, hoped_s=1.006) == ["home"]
    assert taken(monkeypatch, 0.002, near, hoped_s=1.004)[:2] == ["anywhere", "home"]


def test_far_from_the_bound_the_other_is_tried_and_what_was_learned_last(monkeypatch):
    far: dict[str, float | None] = {"home": 1.03, "anywhere": 1.04}
    assert taken(monkeypatch, 0.0, far) == ["home", "anywhere", "home, learned"]
    assert taken(monkeypatch, 0.002, far) == ["anywhere", "home", "home, learned"]
    assert taken(monkeypatch, 0.0, far, learns=False) == ["home", "anywhere"]
    assert taken(monkeypatch, 0.002, {"home": 1.01, "anywhere": 1.04}) == ["anywhere", "home"]


def test_a_home_on_the_host_that_costs_too_much_is_not_tried(monkeypatch):
    far: dict[str, float | None] = {"home": 1.03, "anywhere": 1.04}
    assert taken(monkeypatch, 0.021, far) == ["anywhere"]
    assert taken(monkeypatch, 0.019, far) == ["anywhere", "home"]


@pytest.mark.parametrize("fits", [(30, 30), (90, 30), (90, 0)])
def test_what_home_costs_is_asked_with_as_much_room_as_it_fits_with(monkeypatch, fits):
    far: dict[str, float | None] = {"home": 1.03, "anywhere": 1.04}
    assert taken(monkeypatch, 0.001, far, fits=fits)[0] == "home"
    assert taken(monkeypatch, 0.01, far, fits=fits)[:2] == ["anywhere", "home"]
    assert taken(monkeypatch, 0.03, far, fits=fits) == ["anywhere"]


def test_a_home_that_never_fits_is_not_tried(monkeypatch):
    far: dict[str, float | None] = {"home": 1.03, "anywhere": 1.04}
    assert taken(monkeypatch, 0.0, far, fits=(90, -1)) == ["anywhere"]


def test_a_quick_search_does_not_use_what_was_learned(monkeypatch):
    far: dict[str, float | None] = {"home": 1.03, "anywhere": 1.04}
    quick = Choices(effort="quick")
    assert taken(monkeypatch, 0.0, far, choices=quick) == ["home", "anywhere"]


def test_where_one_finds_nothing_the_other_is_tried(monkeypatch):
    assert taken(monkeypatch, 0.0, {"home": None, "anywhere": 1.01}) == ["home", "anywhere"]
    assert taken(monkeypatch, 0.1, {"home": 1.01, "anywhere": None}) == ["anywhere", "home"]


def test_what_cannot_beat_a_known_plan_by_much_gets_one_try(monkeypatch):
    far: dict[str, float | None] = {"home": 1.03, "anywhere": 1.04}
    assert taken(monkeypatch, 0.0, far, beat_ns=1.004e9) == ["home"]
    assert taken(monkeypatch, 0.0, far, beat_ns=1.006e9)[1:] == ["anywhere", "home, learned"]


def test_fixed_choices_are_the_only_ones(monkeypatch):
    far: dict[str, float | None] = {"home": 1.03, "anywhere": 1.04}
    assert taken(monkeypatch, 0.0, far, choices=FIXED) == ["anywhere"]


def test_what_decisions_come_to_is_solved_once_and_the_next_begins_there(monkeypatch):
    starts: list[LowerBound | None] = []
    found: list[LowerBound | None] = []
    solve = BoundProgram.fewest_copies

    def noted(
        self: BoundProgram, caps: Caps, shares: Any = None, start: LowerBound | None = None
    ) -> LowerBound | None:
        starts.append(start)
        found.append(solve(self, caps, shares, start))
        return found[-1]

    monkeypatch.setattr(BoundProgram, "fewest_copies", noted)
    decider = Decider(CHAIN, MACHINE, CAPS, 4)
    shares = full_shares(len(decider.small.tasks))
    at_home = Choices(homes={"gradient": "host", "parameter": "host", "optimizer_state": "host"})
    some_s = decider.decided_s(OPEN, 0, shares)
    assert decider.decided_s(OPEN, 0, shares) == some_s
    assert starts == [None]
    home_s = decider.decided_s(at_home, 0, shares)
    assert home_s >= some_s * (1 - 1e-9)
    decider.decided_s(OPEN, 64 * KIB, shares)
    assert starts == [None, found[0], found[0]]
    fitting = decider.fitting(OPEN, 64 * KIB, shares)
    assert fitting is not None
    assert fitting[0].decisions.step_s == found[2].step_s  # type: ignore[union-attr]
    assert decider.decided_s(OPEN, 10**9, shares) == inf
