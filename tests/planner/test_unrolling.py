"""A schedule of many rounds is the one of a few, with the middle ones repeated."""

from dataclasses import replace
from functools import cache

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.planning import cuts_of
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.planner.choices import OPEN
from twinstream.planner.emit import unrolling
from twinstream.planner.emit.emission import Emitted
from twinstream.planner.emit.unrolling import unrolled
from twinstream.planner.lifetimes.rounds import Folding
from twinstream.planner.request import TrainingStep
from twinstream.planner.search.cut_planner import CutPlanner
from twinstream.planner.search.knobs import Attempt
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy, Op
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.simulator.replay import steady_state

KIB = 1024
SPEC = small("tiny", num_layers=4)
SLOW = MACHINE.model_copy(update={f"pcie_{way}_bytes_per_s": number(3e8) for way in ("h2d", "d2h")})
CUTS = {
    "one chunk": {"seq_len": 64, "chunk_tokens": 64, "chunks_per_round": 1},
    "two chunks": {"seq_len": 64, "chunk_tokens": 64, "chunks_per_round": 2},
    "slices": {"seq_len": 96, "chunk_tokens": 32, "chunks_per_round": 3},
}
CASES = [
    (cut, device_kib, room) for cut in CUTS for device_kib in (420, 500, 700) for room in (0, 60)
]

CASE = ("two chunks", 500, 60)


@cache
def simulated(cut: str, device_kib: int, room_kib: int) -> tuple[CutPlanner, Attempt] | None:
    """A step of nine rounds with so much room for copies in flight, where that fits."""
    of = CUTS[cut]
    tokens = 9 * of["chunk_tokens"] * of["chunks_per_round"]
    step = TrainingStep(**of, tokens_per_step=tokens)
    cuts = cuts_of(SPEC, step, SLOW, Caps(device_bytes=device_kib * KIB))
    planner = CutPlanner(cuts, cuts.usual[0], steady_state)
    attempt = planner.attempt(planner.first_knobs(OPEN, room_kib * KIB), [], None)
    return None if attempt.simulated is None else (planner, attempt)


def sources(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From how many rounds schedules are unrolled from now on, those that are."""
    found: list[int] = []

    def recorded(few: Emitted, chain: Chain) -> RankSchedule | None:
        schedule = unrolled(few, chain)
        if schedule is not None:
            found.append(few.schedule.workload.rounds_per_step)
        return schedule

    monkeypatch.setattr(unrolling, "unrolled", recorded)
    return found


@pytest.mark.parametrize(("num_rounds", "from_rounds"), [(5, {4}), (9, {4, 5})])
def test_it_is_the_schedule_that_all_rounds_come_to_one_by_one(
    monkeypatch, num_rounds, from_rounds
):
    """From four rounds in some of the cases, from five in all others."""
    unrolled_from = sources(monkeypatch)
    cases = [found for case in CASES if (found := simulated(*case)) is not None]
    assert len(cases) > 9
    assert {planner.cut.workload.chunks_per_round for planner, _ in cases} == {1, 2, 3}
    for planner, attempt in cases:
        chain = with_rounds_of(planner, num_rounds)
        schedule = planner.schedule(attempt, chain)
        with monkeypatch.context() as patched:
            patched.setattr(unrolling, "unrolled", lambda *_: None)
            assert schedule == planner.schedule(attempt, chain)
        assert not verify_rank(schedule)
        assert not conforms(schedule, chain)
    assert set(unrolled_from) == from_rounds
    assert len(unrolled_from) == len(cases) or num_rounds == 5


def with_rounds_of(planner: CutPlanner, num_rounds: int) -> Chain:
    workload = planner.cut.workload.model_copy(update={"rounds_per_step": num_rounds})
    return lower(SPEC, workload)


def test_the_simulated_rounds_need_no_other_schedule():
    planner, attempt = case()
    assert planner.schedule(attempt, planner.few.chain) is attempt.simulated.emitted.schedule


def case() -> tuple[CutPlanner, Attempt]:
    found = simulated(*CASE)
    assert found is not None
    return found


def five() -> Emitted:
    """Five rounds of a case, which repeat."""
    planner, attempt = case()
    made: list[Emitted] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unrolling, "unrolled", lambda few, _: made.append(few))
        planner.schedule(attempt, with_rounds_of(planner, 9))
    return made[-1]


def nine(few: Emitted) -> RankSchedule | None:
    """Nine rounds of the five."""
    return unrolled(few, with_rounds_of(case()[0], 9))


def issued_in(few: Emitted, round_: int, kind: type[Op]) -> list[int]:
    starts = Folding.of(few.placement.chain, few.placement.tasks).starts
    inside = range(starts[round_], starts[round_ + 1])
    return [
        i
        for i, op in enumerate(few.schedule.ops)
        if isinstance(op, kind) and few.positions[i] in inside
    ]


def changed(few: Emitted, index: int, **update: object) -> Emitted:
    """The few with one op changed."""
    ops = list(few.schedule.ops)
    ops[index] = ops[index].model_copy(update=update)
    return replace(few, schedule=few.schedule.model_copy(update={"ops": tuple(ops)}))


def test_rounds_that_do_not_repeat_are_not_unrolled():
    few = five()
    assert nine(few) is not None
    copies = issued_in(few, 2, Copy)
    elsewhere = few.schedule.ops[copies[0]].source
    assert nine(changed(few, copies[1], destination=elsewhere)) is None


def test_a_round_that_waits_for_the_first_or_for_the_middle_of_the_pass_before_is_not_unrolled():
    few = five()
    ops = few.schedule.ops
    first, third = issued_in(few, 0, Compute)[0], issued_in(few, 2, Copy)[0]
    last = issued_in(few, 4, Copy)[0]
    assert nine(changed(few, third, waits=(ops[first].op_id,))) is None
    assert nine(changed(few, last, waits=(ops[first].op_id,))) is None
    assert nine(changed(few, first, waits_previous=(ops[third].op_id,))) is None
    assert nine(changed(few, third, waits_previous=(ops[last].op_id,))) is None
