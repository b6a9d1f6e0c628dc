"""Orders of pipelines: every microbatch once, after what it needs, and in flight as theory says."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstream.models.layouts.layout import Layout
from twinstream.models.layouts.orders import Action, actions_of

PIPELINES = ("gpipe", "1f1b", "interleaved", "ring", "zero_bubble")


@st.composite
def pipelines(draw):
    """A layout and how many microbatches it has."""
    order, pp = draw(st.sampled_from(PIPELINES)), draw(st.integers(1, 6))
    virtual = draw(st.integers(1, 3)) if order in ("interleaved", "ring") and pp > 1 else 1
    count = draw(st.integers(1, 4)) * (pp if order == "interleaved" else 1)
    return Layout(pp=pp, virtual_stages=virtual, pipeline=order), count


def test_1f1b_of_four_stages_is_the_papers_figure():
    # Narayanan et al., arXiv:2104.04473, figure 4, top: stages 0 and 2 of four
    def shown(stage: int) -> str:
        found = actions_of(Layout(pp=4), stage, 8)
        return " ".join(f"{a.phase[0].upper()}{a.microbatch}" for a in found)

    assert shown(0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert shown(2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"


def test_interleaved_of_two_chunks_is_the_papers_figure():
    # figure 4, bottom, device 1: two chunks, four stages
    found = actions_of(Layout(pp=4, virtual_stages=2, pipeline="interleaved"), 0, 8)
    begun = [(a.phase[0], a.chunk, a.microbatch) for a in found[:14]]
    forward = [("f", c, j) for c in (0, 1) for j in range(4)] + [("f", 0, 4), ("f", 0, 5)]
    assert begun[:10] == forward
    assert begun[10:] == [("f", 0, 6), ("b", 1, 0), ("f", 0, 7), ("b", 1, 1)]


def test_zero_bubble_puts_off_the_gradients_of_weights():
    found = actions_of(Layout(pp=2, pipeline="zero_bubble"), 1, 3)
    assert [(a.phase[0], a.microbatch) for a in found] == [
        ("f", 0), ("b", 0), ("f", 1), ("b", 1), ("w", 0), ("f", 2), ("b", 2), ("w", 1), ("w", 2),
    ]  # fmt: skip


@given(pipelines())
def test_each_microbatch_goes_forward_and_backward_once_through_each_chunk(found):
    layout, count = found
    phases = ["forward", "backward"] + ["weight"] * (layout.pipeline == "zero_bubble")
    each = {
        Action(phase, chunk, j)
        for phase in phases
        for chunk in range(layout.virtual_stages)
        for j in range(count)
    }
    for stage in range(layout.pp):
        actions = actions_of(layout, stage, count)
        assert Counter(actions) == Counter(each)
        place = {action: at for at, action in enumerate(actions)}
        for action in actions:
            _, chunk, j = action
            forward, backward = Action("forward", chunk, j), Action("backward", chunk, j)
            assert place[forward] < place[backward]
            if action.phase == "weight":
                assert place[backward] < place[action]


@given(pipelines())
def test_no_stage_waits_for_ever(found):
    """Microbatches arrive in order, and what a stage does next another has made possible."""
    layout, count = found
    last = layout.pp * layout.virtual_stages - 1
    left = [actions_of(layout, stage, count) for stage in range(layout.pp)]
    done: set[tuple[str, int, int]] = set()

    def possible(stage: int, action: Action) -> bool:
        phase, chunk, j = action
        place = chunk * layout.pp + stage
        if phase == "forward":
            return place == 0 or ("forward", place - 1, j) in done
        return phase == "weight" or place == last or ("backward", place + 1, j) in done

    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(left):
            while actions and possible(stage, actions[0]):
                phase, chunk, j = actions.pop(0)
                done.add((phase, chunk * layout.pp + stage, j))
                moved = True
    assert not any(left)


@pytest.mark.parametrize("pp", [2, 4, 7])
@pytest.mark.parametrize("groups", [1, 3])
def test_what_is_in_flight_is_what_theory_says(pp, groups):
    """Microbatches (of interleaved and ring: chunks of them) between their forward and the last
    that needs what it kept."""
    count = groups * pp

    def most(stage: int, pipeline: str, virtual: int = 1) -> int:
        layout = Layout(pp=pp, virtual_stages=virtual, pipeline=pipeline)
        ends = "weight" if pipeline == "zero_bubble" else "backward"
        held = found = 0
        for action in actions_of(layout, stage, count):
            held += action.phase == "forward"
            found = max(found, held)
            held -= action.phase == ends
        return found

    for stage in range(pp):
        assert most(stage, "gpipe") == count
        assert most(stage, "1f1b") == pp - stage
        assert most(stage, "zero_bubble") == min(count, pp)
        assert most(stage, "ring", 3) == 3 * count
        ahead = 2 * (pp - 1 - stage) + 2 * pp + 1
        assert most(stage, "interleaved", 3) == (3 * count if groups == 1 else ahead)
