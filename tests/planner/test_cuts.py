"""Bounds of ways to cut: rough ones are refined beside other work, and count as refined."""

import pytest

from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_model
from twinstream.planner.bound.kept_programs import FEW_SEGMENTS
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.choices import Choices
from twinstream.planner.request import caps_of
from twinstream.planner.search.chunking import TrainingStep, admissible
from twinstream.planner.search.cuts import Cuts

H100 = load_machine("h100")


def test_what_is_refined_beside_counts_with_its_refined_bound():
    caps = caps_of(H100, "24GiB", "100GiB")
    step = TrainingStep(seq_len=8192, tokens_per_step=38 * 8192)
    cuts = Cuts(load_model("8b"), step, H100, Choices(), caps)
    usual = cuts.usual
    assert not usual[0].rough
    refined_s = []
    for cut in usual:
        rounds = cut.workload.rounds_per_step
        bound = lower_bound(cut.small, H100, caps, num_rounds=rounds)
        assert bound is not None
        assert bound.step_s >= cut.bound.step_s * (1 if cut.rough else 1 - 1e-9)
        refined_s.append(bound.step_s)
    rough_s = min(cut.bound.step_s for cut in usual)
    assert rough_s < min(refined_s)
    assert cuts.least_refined_s(usual) == min(refined_s)


def test_what_goes_wrong_beside_is_raised_where_it_is_asked_for(monkeypatch):
    caps = caps_of(H100, "24GiB", "100GiB")
    step = TrainingStep(seq_len=8192, tokens_per_step=38 * 8192)
    cuts = Cuts(load_model("8b"), step, H100, Choices(), caps)
    rough, before = [], cuts.cut

    def failing(small, workload, most_segments=None):
        if most_segments is None and not rough:
            rough.append(workload)
            raise MemoryError("no room for the solver")
        return before(small, workload, most_segments)

    monkeypatch.setattr(cuts, "cut", failing)
    usual = cuts.usual
    with pytest.raises(MemoryError, match="no room"):
        cuts.least_refined_s(usual)
    cuts.close()


def test_a_bound_that_more_segments_would_not_raise_is_not_rough():
    step = TrainingStep(seq_len=2**17, tokens_per_step=2**18)
    cuts = Cuts(load_model("8b"), step, H100, Choices(), caps_of(H100, "60GiB", "500GiB"))
    for workload in admissible(cuts.spec, step)[:2]:
        cut = cuts.cut(cuts.lowered(workload, 2), workload, FEW_SEGMENTS)
        assert cut is not None
        assert len(set(cut.bound.segment_of_task)) < len(cut.small.tasks)
        more = cuts.cut(cut.small, workload)
        assert more is not None
        assert more.bound.segment_of_task == cut.bound.segment_of_task
        assert not cut.rough
        assert cuts.refined(cut) is cut
