"""Fractions made whole: evenly spread over the names, and alike in all rounds."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.decide.decisions import Decisions
from twinstream.planner.lifetimes.rounds import Folding
from twinstream.planner.lifetimes.view import ChainView
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

NUM_LAYERS = 24
TENTHS = range(1, 10)
TOLERANCE = 1.5  # of ten


def chain_of(rounds: int) -> Chain:
    workload = Workload(seq_len=16, chunk_tokens=16, chunks_per_round=1, rounds_per_step=rounds)
    return lower(small("tiny", num_layers=NUM_LAYERS), workload)


@cache
def solved() -> tuple[Chain, Relaxation]:
    """Any solution; the tests put fractions of their own into it."""
    chain = chain_of(3)
    program = BoundProgram(ChainView(chain), MACHINE, 6, ProgramKind(tied=True))
    found = program.fewest_copies(Caps(device_bytes=2**20))
    assert found is not None
    return chain, found


def keeping(share: float) -> Decisions:
    """Decisions where the program keeps this share of everything over every gap."""
    chain, found = solved()
    fractions = tuple(replace(s, kept=share, loaded=1.0 - share) for s in found.fractions)
    return Decisions.of(replace(found, fractions=fractions), ChainView(chain))


def recomputing(shares: dict[str, float]) -> Decisions:
    """Decisions where the program recomputes these shares of every block, by level."""
    chain, found = solved()
    recomputed = {r.task.task_id: shares.get(r.task.label.level, 0.0) for r in chain.recomputes}
    return Decisions.of(replace(found, recomputed=recomputed), ChainView(chain))


def names_by_kind(decisions: Decisions) -> list[list[str]]:
    """Units of the same role and size, as decisions name them."""
    units = ChainView(solved()[0]).units.units
    kinds: dict[tuple[str, int], dict[str, None]] = {}
    for name, _ in decisions.kept:
        tensor = units[name].tensor
        kinds.setdefault((tensor.role, tensor.size_bytes), {})[name] = None
    return [list(names) for names in kinds.values()]


def ten_in_a_row(flags: Iterable[bool]) -> list[int]:
    """How many of every ten consecutive ones are true."""
    listed = list(flags)
    return [sum(listed[i : i + 10]) for i in range(len(listed) - 9)]


@pytest.mark.parametrize("tenths", TENTHS)
def test_of_any_ten_units_of_a_kind_as_many_stay_as_the_program_says(tenths):
    decisions = keeping(tenths / 10)
    stays = {name: kept for (name, _), kept in decisions.kept.items()}
    counts = [
        count
        for names in names_by_kind(decisions)
        for count in ten_in_a_row(stays[name] for name in names)
    ]
    assert len(counts) > 40
    assert max(abs(count - tenths) for count in counts) <= TOLERANCE


@pytest.mark.parametrize("tenths", TENTHS)
def test_a_unit_stays_over_all_its_gaps_or_none_where_shares_are_alike(tenths):
    decisions = keeping(tenths / 10)
    flags: dict[str, set[bool]] = {}
    for (name, _), kept in decisions.kept.items():
        flags.setdefault(name, set()).add(kept)
    assert {len(found) for found in flags.values()} == {1}
    assert len(flags) < len(decisions.kept)


def test_what_stays_at_a_share_stays_at_any_larger_one():
    before: set[object] = set()
    for tenths in TENTHS:
        now = {key for key, kept in keeping(tenths / 10).kept.items() if kept}
        assert before < now
        before = now


def test_whole_fractions_stay_as_they_are():
    assert set(keeping(1.0).kept.values()) == {True}
    assert set(keeping(0.0).kept.values()) == {False}
    for level in ("ATTENTION", "INPUT"):
        decisions = recomputing({level: 1.0})
        assert set(decisions.levels.values()) == {level}
        assert len(decisions.levels) == 3 * NUM_LAYERS
    assert recomputing({}).levels == {}


@pytest.mark.parametrize("tenths", TENTHS)
def test_of_any_ten_blocks_as_many_are_recomputed_as_the_program_says(tenths):
    decisions = recomputing({"ATTENTION": 0.3 * tenths / 10, "INPUT": 0.7 * tenths / 10})
    chain, _ = solved()
    for level, wanted in (("ATTENTION", 0.3 * tenths), ("INPUT", 0.7 * tenths)):
        for row in levels_by_round(decisions, chain):
            counts = ten_in_a_row(found == level for found in row)
            assert len(counts) == NUM_LAYERS - 9
            assert max(abs(count - wanted) for count in counts) <= TOLERANCE + 1
    for row in levels_by_round(decisions, chain):
        counts = ten_in_a_row(found is not None for found in row)
        assert max(abs(count - tenths) for count in counts) <= TOLERANCE


def levels_by_round(decisions: Decisions, chain: Chain) -> list[list[str | None]]:
    """Of every round, the levels of its blocks in order."""
    folding = Folding.of(chain, chain.tasks)
    position = {task.task_id: i for i, task in enumerate(chain.tasks)}
    chosen = decisions.recomputes(ChainView(chain))
    rows: list[list[str | None]] = [[] for _ in range(folding.num_rounds)]
    groups = {r.group: position[r.before] for r in chain.recomputes}
    for group, at in sorted(groups.items(), key=lambda item: item[1]):
        rows[folding.round_of(at)].append(chosen.get(group))
    return rows


def test_the_same_blocks_are_recomputed_in_every_round_of_a_longer_step():
    decisions = recomputing({"ATTENTION": 0.25, "INPUT": 0.35})
    rows = levels_by_round(decisions, chain_of(6))
    assert len(rows) == 6
    assert all(row == rows[0] for row in rows)
    assert {"ATTENTION", "INPUT", None} == set(rows[0])


def test_a_program_asked_twice_answers_as_a_new_one():
    chain, wide = chain_of(3), Caps(device_bytes=2**20)
    tight = Caps(device_bytes=2**17, host_bytes=2**24)

    def new() -> BoundProgram:
        return BoundProgram(ChainView(chain), MACHINE, kind=ProgramKind(tied=True))

    asked = new()
    first, second, again = (asked.fewest_copies(caps) for caps in (wide, tight, wide))
    assert first == again == new().fewest_copies(wide)
    assert second == new().fewest_copies(tight)
    assert first is not None
    assert second is not None
    assert second.fractions != first.fractions
