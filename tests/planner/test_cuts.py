"""Bounds of ways to cut, and which of them are looked at."""

import pytest

from tests.helpers.planning import cuts_of
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_model
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.request import TrainingStep, caps_of
from twinstream.planner.search.cuts import Cuts, StepCut
from twinstream.schedule.document import Caps

H100 = load_machine("h100")
KIB = 1024


@pytest.fixture(scope="module")
def cuts() -> Cuts:
    step = TrainingStep(seq_len=8192, tokens_per_step=38 * 8192)
    return cuts_of(load_model("8b"), step, H100, caps_of(H100, "24GiB", "100GiB"))


def bound_s(cuts: Cuts, cut: StepCut) -> float:
    chain = cuts.view(cut.workload, PROGRAM_ROUNDS).chain
    found = lower_bound(chain, H100, cuts.caps, num_rounds=cut.workload.rounds_per_step)
    assert found is not None
    return found.step_s


def test_cuts_come_with_their_bounds_the_least_first_but_for_nearly_equal_ones(cuts):
    found_s = [bound_s(cuts, cut) for cut in cuts.usual]
    assert [cut.bound.step_s for cut in cuts.usual] == found_s
    assert found_s[0] <= cuts.limits.near_equal * min(found_s)
    far_s = [s for s in found_s if s > cuts.limits.near_equal * min(found_s)]
    assert far_s == sorted(far_s) == found_s[len(found_s) - len(far_s) :]


def test_the_bound_of_the_family_is_the_least_one(cuts):
    least_s = min(cut.bound.step_s for cut in cuts.usual)
    for cut in cuts.usual[:2]:
        stated = cuts.step_bound_of(cut.workload)
        assert (stated.step_s, stated.family_step_s) == (cut.bound.step_s, least_s)


@pytest.mark.parametrize(
    ("spec", "step", "host_kib", "device_kibs"),
    [
        (small("tiny"), TrainingStep(64, 512), None, (100, 345, 360, 500)),
        (small("tiny"), TrainingStep(64, 512), 600, (100, 345, 500, 900)),
        (load_model("tiny"), TrainingStep(64, 256), 10 * KIB, (1000, 4656, 6000)),
        (load_model("tiny"), TrainingStep(64, 256, 128), 10 * KIB, (3000, 4000, 4656, 6000)),
    ],
    ids=["small", "small, little host", "tiny", "tiny, chunks fixed"],
)
def test_what_the_smallest_cuts_do_not_do_with_no_other_does(spec, step, host_kib, device_kibs):
    host_bytes = None if host_kib is None else host_kib * KIB
    outcomes = set()
    for device_kib in device_kibs:
        caps = Caps(device_bytes=device_kib * KIB, host_bytes=host_bytes)
        cuts = cuts_of(spec, step, MACHINE, caps)
        bounds = {
            w: lower_bound(
                cuts.view(w, PROGRAM_ROUNDS).chain, MACHINE, caps, num_rounds=w.rounds_per_step
            )
            for w in cuts.workloads
        }
        possible = {workload for workload, bound in bounds.items() if bound is not None}
        assert bool(possible) == bool(possible.intersection(cuts.smallest))
        assert {cut.workload for cut in cuts.all} == possible
        outcomes.add(bool(possible))
    assert outcomes == {False, True}
