"""Chains and programs are made once, and again once others pushed them out."""

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import Recipe
from twinstream.planner.bound.kept_programs import kept_program
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.kept import Kept, kept_chain, kept_units
from twinstream.schedule.workload import Workload

WORKLOAD = Workload(seq_len=16, chunk_tokens=16, chunks_per_round=1, rounds_per_step=2)


def test_a_value_is_made_once_and_the_one_asked_for_longest_ago_goes_first():
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    kept: Kept[str] = Kept(3)
    for name in ("one", "two", "one", "six", "one", "two"):
        assert kept.get(name, lambda name=name: make(name), lambda value: 1) == name
    assert made == ["one", "two", "six"]
    kept.get("four", lambda: make("four"), lambda value: 1)
    kept.get("six", lambda: make("six"), lambda value: 1)
    assert made == ["one", "two", "six", "four", "six"]


def test_what_is_too_heavy_is_not_kept_and_pushes_nothing_out():
    kept: Kept[str] = Kept(3)
    light = kept.get("light", lambda: "light", lambda value: 1)
    answers = [kept.get("heavy", lambda text=text: text, lambda value: 4) for text in ("a", "b")]
    assert answers == ["a", "b"]
    assert kept.get("light", lambda: "another", lambda value: 1) is light


def test_a_kept_chain_is_the_one_that_lowering_makes_and_recipes_tell_them_apart():
    spec, float32 = small("tiny"), Recipe(gradients="float32")
    chain = kept_chain(spec, WORKLOAD, Recipe())
    assert chain == lower(spec, WORKLOAD, Recipe())
    assert kept_chain(spec, WORKLOAD, Recipe()) is chain
    assert kept_chain(spec, WORKLOAD, float32) == lower(spec, WORKLOAD, float32) != chain


def test_a_kept_program_is_of_its_machine_rounds_and_choices():
    chain = kept_chain(small("tiny"), WORKLOAD, Recipe())
    faster = MACHINE.model_copy(update={"name": "faster"})
    asked = [
        kept_program(chain, machine, num_rounds=2, choices=choices, tied=tied)
        for machine in (MACHINE, faster)
        for choices in (OPEN, Choices(recompute="INPUT"))
        for tied in (False, True)
    ]
    assert len({id(program) for program in asked}) == len(asked)
    assert kept_program(chain, MACHINE, num_rounds=2, choices=OPEN) is asked[0]


def test_units_are_grouped_once_for_a_chain_and_again_for_one_that_equals_it():
    chain, other = (lower(small("tiny"), WORKLOAD) for _ in range(2))
    units = kept_units(chain)
    assert kept_units(chain) is units
    assert chain == other
    assert kept_units(other) is not units
    assert kept_units(other).units == units.units
