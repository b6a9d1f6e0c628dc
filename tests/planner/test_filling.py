"""Filling the device: the room is used up and never overrun, and what is worth least goes first."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.machines_for_plans import slow_link_machine
from tests.helpers.plans import MACHINE
from tests.helpers.small_chains import MS, UNIT_BYTES, Sort, build_chain
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.decide.decisions import Decisions, GapKey, is_kept
from twinstream.planner.decide.filling import Pressure, filled
from twinstream.planner.decide.margins import Bytes, alive_bytes
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.lifetimes.residencies import content_gaps
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import LIMITS
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

CASES = {
    "packed": (
        Workload(seq_len=16, chunk_tokens=32, chunks_per_round=2, rounds_per_step=3),
        MACHINE,
    ),
    "sliced, with recomputes": (
        Workload(seq_len=48, chunk_tokens=16, chunks_per_round=3, rounds_per_step=2),
        slow_link_machine(),
    ),
}


@cache
def case(name: str) -> tuple[TaskSequence, Decisions]:
    """A tiny chain, and what the program decides where little more than half fits."""
    workload, machine = CASES[name]
    view = ChainView(lower(small("tiny"), workload))
    program = BoundProgram(view, machine, kind=ProgramKind(tied=True))
    solved = program.fewest_copies(Caps(device_bytes=170_000))
    assert solved is not None
    decisions = Decisions.of(solved, view)
    return TaskSequence.of(view, decisions, view.call_ns(machine)), decisions


def gap_keys(sequence: TaskSequence) -> set[GapKey]:
    return {
        (unit, sequence.gap_place(before, after))
        for unit, before, after in content_gaps(sequence.uses, sequence.units)
        if not is_kept(sequence.units.units[unit])
    }


def alive(sequence: TaskSequence, decisions: Decisions, kept: Mapping[GapKey, bool]) -> Bytes:
    return alive_bytes(sequence, sequence.residencies(decisions.with_kept(kept)))


def least_alive(sequence: TaskSequence, decisions: Decisions) -> Bytes:
    """What is there where nothing stays over any gap."""
    return alive(sequence, decisions, dict.fromkeys(gap_keys(sequence), False))


def rough_room(sequence: TaskSequence, decisions: Decisions, seed: int, tightest: float) -> Bytes:
    """Room that goes up and down from task to task, from just enough to nearly everything."""
    draw = np.random.default_rng(seed)
    least = least_alive(sequence, decisions)
    most = alive(sequence, decisions, dict.fromkeys(gap_keys(sequence), True))
    steps = np.repeat(draw.uniform(tightest, 1.0, len(least)), draw.integers(1, 12, len(least)))
    return least + ((most - least) * steps[: len(least)]).astype(np.int64)


ROOMS = st.tuples(st.sampled_from(sorted(CASES)), st.integers(0, 10_000), st.floats(-0.1, 1.0))
PRESSURES = st.sampled_from(
    [Pressure(1.0, 1.0), Pressure(1.05, 0.05), Pressure(0.05, 1.05), Pressure(1.0, 1.0, home=10.0)]
)


@given(ROOMS, PRESSURES)
@settings(max_examples=150)
def test_the_room_is_never_overrun_and_is_refused_only_where_nothing_would_fit(drawn, pressure):
    name, seed, tightest = drawn
    sequence, decisions = case(name)
    room = rough_room(sequence, decisions, seed, tightest)
    found = filled(sequence, decisions, room, pressure)
    if found is None:
        assert (least_alive(sequence, decisions) > room).any()
    else:
        assert (alive(sequence, decisions, found.kept) <= room).all()
        assert (found.levels, found.interval_ns) == (decisions.levels, decisions.interval_ns)


@given(ROOMS, PRESSURES)
@settings(max_examples=60)
def test_nothing_more_could_stay_within_the_room(drawn, pressure):
    name, seed, tightest = drawn
    sequence, decisions = case(name)
    room = rough_room(sequence, decisions, seed, max(0.0, tightest))
    found = filled(sequence, decisions, room, pressure)
    assert found is not None
    assert set(found.kept) == gap_keys(sequence)
    for key, stays in found.kept.items():
        if not stays:
            assert (alive(sequence, decisions, {**found.kept, key: True}) > room).any()


@pytest.mark.parametrize("name", CASES)
def test_where_everything_fits_everything_stays(name):
    sequence, decisions = case(name)
    found = filled(sequence, decisions, np.full(len(sequence.tasks), 2**40), Pressure(1.0, 1.0))
    assert found is not None
    assert all(found.kept.values())


# --- what is given up first


def small_sequence(chain: Chain, durations_ms: list[float]) -> tuple[TaskSequence, Decisions]:
    nothing = Decisions({}, {}, {(0, i): ms * MS for i, ms in enumerate(durations_ms)})
    call_ns = {f"call{i}": ms * MS for i, ms in enumerate(durations_ms)}
    return TaskSequence.of(ChainView(chain), nothing, call_ns), nothing


def kept_in(
    sequence: TaskSequence, start: Decisions, room_units: list[int], home: float = 0.0
) -> dict[GapKey, bool]:
    room = np.asarray(room_units, dtype=np.int64) * UNIT_BYTES
    found = filled(sequence, start, room, Pressure(1.0, 1.0, home))
    assert found is not None
    return dict(found.kept)


@pytest.mark.parametrize("stays_at_first", [True, False])
@pytest.mark.parametrize(
    ("durations_ms", "kept"),
    [([1, 5, 1, 1, 1], {"x": False, "y": True}), ([1, 1, 1, 5, 1], {"x": True, "y": False})],
)
def test_of_two_gaps_the_longer_is_given_up_and_the_shorter_taken_up(
    durations_ms, kept, stays_at_first
):
    """Copies are the same; over the longer gap memory is taken for more time."""
    x = Sort("x", 1, "activation", {0: ("write", 1), 3: ("read", 1)})
    y = Sort("y", 1, "activation", {1: ("write", 1), 4: ("read", 1)})
    sequence, nothing = small_sequence(build_chain([x, y], durations_ms), durations_ms)
    start = nothing.with_kept({("x", (0, 0)): stays_at_first, ("y", (0, 1)): stays_at_first})
    found = kept_in(sequence, start, [2, 2, 1, 2, 2])
    assert {name: stays for (name, _), stays in found.items()} == kept


@pytest.mark.parametrize("role", ["first", "last"])
def test_content_that_would_have_to_be_stored_as_well_stays_rather_than_what_is_on_the_host(role):
    """Over the same gap, a parameter is loaded again, an activation is stored and loaded."""
    made = Sort("made", 1, "activation", {0: ("write", 1), 3: ("read", 1)})
    known = Sort("known", 1, "parameter", {0: ("read", 0), 3: ("read", 0)})
    sorts = [made, known] if role == "first" else [known, made]
    sequence, nothing = small_sequence(build_chain(sorts, [1.0] * 4), [1.0] * 4)
    found = kept_in(sequence, nothing, [2, 1, 1, 2])
    assert found["made", (0, 0)]
    assert not found["known", (0, 0)]


def test_only_gaps_over_tasks_without_room_are_given_up():
    x = Sort("x", 1, "activation", {0: ("write", 1), 2: ("read", 1)})
    y = Sort("y", 1, "activation", {2: ("write", 1), 4: ("read", 1)})
    sequence, nothing = small_sequence(build_chain([x, y], [1.0] * 5), [1.0] * 5)
    found = kept_in(sequence, nothing, [2, 1, 2, 0, 2])
    assert found == {("x", (0, 0)): True, ("y", (0, 2)): False}
    found = kept_in(sequence, nothing, [2, 0, 2, 1, 2])
    assert found == {("x", (0, 0)): False, ("y", (0, 2)): True}


# --- where host memory is scarce

TWICE = Sort("twice", 1, "activation", {0: ("write", 1), 2: ("read", 1), 5: ("read", 1)})
LONG = Sort("long", 1, "activation", {1: ("write", 1), 6: ("read", 1)})


@pytest.mark.parametrize(("home", "given_up"), [(0.0, "long"), (10.0, "twice")])
def test_what_has_a_home_anyway_is_given_up_before_what_would_need_one(home, given_up):
    """One unit leaves over its first gap in any case; the other has the longer gap."""
    sequence, nothing = small_sequence(build_chain([TWICE, LONG], [1.0] * 7), [1.0] * 7)
    start = nothing.with_kept({("twice", (0, 0)): False})
    kept = kept_in(sequence, start, [1, 1, 2, 1, 1, 2, 1], home)
    assert not kept["twice", (0, 0)]
    assert {name for name, place in kept if not kept[name, place]} == {"twice", given_up}
    assert kept["twice", (0, 2)] == (given_up == "long")


def priced(link_s_per_gb_per_s: dict[str, float], host_s_per_gib: float = 0.0) -> Relaxation:
    none = {
        "limits": (),
        "fractions": (),
        "recomputed": {},
        "interval_ms": (),
        "segment_of_task": (),
    }
    return Relaxation(2.0, 0.0, host_s_per_gib, link_s_per_gb_per_s, **none)  # type: ignore[arg-type]


def test_a_direction_without_a_price_costs_a_little_and_shared_links_count_for_both():
    only_loads = Pressure.of(priced({"h2d": 3.0}), 1, LIMITS)
    assert only_loads.load > 10 * only_loads.store > 0
    both = Pressure.of(priced({"h2d": 1.0, "pcie": 1.0}), 1, LIMITS)
    assert both.load > both.store > 0.3
    assert Pressure.of(priced({}), 1, LIMITS) == Pressure(1.0, 1.0)


def test_a_home_costs_what_the_host_does_over_the_copies_of_all_rounds():
    """0.6 s per GB/s in 2 s: a GiB copied takes 0.3 s."""
    links = {"h2d": 0.4, "d2h": 0.2}
    assert Pressure.of(priced(links, 0.9), 1, LIMITS).home == pytest.approx(3.0)
    assert Pressure.of(priced(links, 0.9), 6, LIMITS).home == pytest.approx(0.5)
    assert Pressure.of(priced({}, 0.9), 1, LIMITS).home > 100
