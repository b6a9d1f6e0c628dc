"""Bounds of ways to cut: rough ones are refined where their turn comes, and count as refined."""

import pytest

from tests.helpers.planning import cuts_of
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_model
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.request import TrainingStep, caps_of
from twinstream.planner.search.cuts import Cuts

H100 = load_machine("h100")


@pytest.fixture(scope="module")
def cuts() -> Cuts:
    step = TrainingStep(seq_len=8192, tokens_per_step=38 * 8192)
    return cuts_of(load_model("8b"), step, H100, caps_of(H100, "24GiB", "100GiB"))


def bound_s(cuts: Cuts, cut) -> float:
    """Of as many segments as a bound has."""
    chain = cuts.view(cut.workload, PROGRAM_ROUNDS).chain
    found = lower_bound(chain, H100, cuts.caps, num_rounds=cut.workload.rounds_per_step)
    assert found is not None
    return found.step_s


def test_cuts_come_with_their_refined_bounds_the_least_first(cuts):
    usual = cuts.usual
    assert any(cut.rough for cut in usual)
    refined_s = [bound_s(cuts, cut) for cut in usual]
    for cut, found_s in zip(usual, refined_s, strict=True):
        assert found_s >= cut.bound.step_s * (1 - 1e-9)
    first, second = (cut for cut, _ in zip(cuts.in_turn(usual), range(2), strict=False))
    assert not first.rough and not second.rough
    assert first.bound.step_s == bound_s(cuts, first)
    assert first.bound.step_s <= 1.01 * min(refined_s)


def test_the_bound_of_the_family_is_the_least_refined_one(cuts):
    least_s = min(bound_s(cuts, cut) for cut in cuts.usual)
    for cut in cuts.usual[:2]:
        stated = cuts.step_bound_of(cuts.cut_of(cut.workload))
        assert stated.family_step_s == least_s <= stated.step_s


def test_a_bound_that_more_segments_would_not_raise_is_not_rough():
    step = TrainingStep(seq_len=2**17, tokens_per_step=2**18)
    cuts = cuts_of(load_model("8b"), step, H100, caps_of(H100, "60GiB", "500GiB"))
    for cut in cuts.usual[:2]:
        refined = cuts.cut_of(cut.workload)
        assert cut.rough == (refined.bound.segment_of_task != cut.bound.segment_of_task)
