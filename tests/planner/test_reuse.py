"""What plans have in common is made once, in time forgotten, and changes nothing."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.helpers.planning import plan_step, request_of
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner import reuse
from twinstream.planner.bound.lower_bound import ProgramKind
from twinstream.planner.choices import Choices
from twinstream.planner.planner import Planner
from twinstream.planner.request import TrainingStep
from twinstream.planner.reuse import Reuse
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import steady_state

SPEC = small("tiny")
WORKLOAD = Workload(seq_len=16, chunk_tokens=16, chunks_per_round=1, rounds_per_step=5)
STEP = TrainingStep(seq_len=64, tokens_per_step=256)
KIB = 1024


def test_a_chain_is_lowered_once_for_all_steps_of_as_many_rounds_or_more():
    kept, longer = Reuse(), WORKLOAD.model_copy(update={"rounds_per_step": 9})
    view = kept.view(SPEC, WORKLOAD, Recipe(), 3)
    assert kept.view(SPEC, longer, Recipe(), 3) is view
    assert view.chain == lower(SPEC, WORKLOAD.model_copy(update={"rounds_per_step": 3}))
    assert kept.view(SPEC, WORKLOAD, Recipe(), 4) is not view
    assert kept.view(SPEC, WORKLOAD, Recipe(gradients="float32"), 3) is not view


def test_a_program_is_of_its_machine_rounds_and_kind():
    kept, faster = Reuse(), MACHINE.model_copy(update={"name": "faster"})
    asked = [
        kept.program(SPEC, WORKLOAD, Recipe(), machine, ProgramKind(choices, tied=tied))
        for machine in (MACHINE, faster)
        for choices in (Choices(), Choices(recompute="INPUT"))
        for tied in (False, True)
    ]
    assert len({id(program) for program in asked}) == len(asked)
    assert kept.program(SPEC, WORKLOAD, Recipe(), MACHINE, ProgramKind(Choices())) is asked[0]


def test_the_one_asked_for_longest_ago_is_forgotten_and_one_too_heavy_is_not_kept(monkeypatch):
    cuts = {n: WORKLOAD.model_copy(update={"rounds_per_step": n}) for n in (1, 2, 3)}
    weights = {n: len(lower(SPEC, cut).tasks) for n, cut in cuts.items()}
    kept = Reuse()

    def view(rounds: int):
        return kept.view(SPEC, cuts[rounds], Recipe(), 9)

    monkeypatch.setattr(reuse, "_MOST_TASKS", weights[3] - 1)
    assert view(3) is not view(3)
    monkeypatch.setattr(reuse, "_MOST_TASKS", weights[1] + weights[3])
    one, two = view(1), view(2)
    assert view(2) is two and view(1) is one
    three = view(3)
    assert view(1) is one and view(3) is three
    assert view(2) is not two


@pytest.mark.parametrize("policy", ["optimal", "streaming"])
def test_plans_are_the_same_whatever_was_planned_before(policy):
    planner = Planner(steady_state)
    requests = [
        request_of(SPEC, STEP, MACHINE, Caps(device_bytes=kib * KIB), policy)
        for kib in (420, 900, 600)
    ]
    alone = [plan_step(SPEC, STEP, MACHINE, r.caps, policy) for r in requests]
    for order in ((0, 1, 2), (2, 1, 0), (0, 0, 1)):
        for number in order:
            assert planner.plan(requests[number]).model_dump_json() == (
                alone[number].model_dump_json()
            )


def test_one_planner_serves_several_threads():
    planner = Planner(steady_state)
    quick = Choices(effort="quick")
    requests = [
        request_of(SPEC, replace(STEP, chunk_tokens=chunk), MACHINE, Caps(device_bytes=900 * KIB),
                   choices=quick)
        for chunk in (64, 128)
    ]  # fmt: skip
    alone = [Planner(steady_state).plan(request) for request in requests]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(planner.plan, 3 * requests)) == 3 * alone
