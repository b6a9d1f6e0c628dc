"""Rule-based policies plan a few rounds; what all rounds take to plan does not grow with them."""

from importlib import import_module

import pytest

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.lowering import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import Recipe
from twinstream.planner import unrolling
from twinstream.planner.emission import Emitted, Placement, emitted
from twinstream.planner.plan import plan_chain, recipe_of
from twinstream.planner.rounds import JUDGED_ROUNDS
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

POLICIES = ("streaming", "resident", "full_recompute", "optimizer_offload", "layer_offload")
CUTS = {
    "one chunk": {"seq_len": 64, "chunk_tokens": 64, "chunks_per_round": 1},
    "two chunks": {"seq_len": 64, "chunk_tokens": 64, "chunks_per_round": 2},
    "slices": {"seq_len": 96, "chunk_tokens": 32, "chunks_per_round": 3},
}
KIB = 1024


def chain_of(policy: str, cut: str, num_rounds: int) -> Chain:
    workload = Workload(**CUTS[cut], rounds_per_step=num_rounds)
    return lower(small("tiny", num_layers=4), workload, recipe_of(policy, Recipe()))


def caps_of(policy: str) -> Caps:
    """Tight for the one that adapts to them."""
    return Caps(device_bytes=500 * KIB) if policy == "streaming" else Caps()


def rounds_made(policy: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many rounds the schedules are that a policy makes from now on."""
    found: list[int] = []

    def recorded(placement: Placement, *others: object) -> Emitted:
        found.append(len(placement.chain.round_starts))
        return emitted(placement, *others)  # type: ignore[arg-type]

    module = import_module(f"twinstream.planner.policies.{policy}")
    monkeypatch.setattr(module, "emitted", recorded)
    return found


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_all_rounds_are_planned_as_a_few(monkeypatch, policy, cut):
    """And it is the plan that they come to one by one."""
    made = rounds_made(policy, monkeypatch)
    chain, caps = chain_of(policy, cut, 9), caps_of(policy)
    schedule = plan_chain(chain, MACHINE, caps, policy)
    assert made and max(made) <= JUDGED_ROUNDS + 1
    made.clear()
    monkeypatch.setattr(unrolling, "unrolled", lambda *_: None)
    assert plan_chain(chain, MACHINE, caps, policy) == schedule
    assert made[-1] == 9


def test_margins_of_whole_blocks_are_as_long_in_every_round(monkeypatch):
    """Sums of fractions of a ns would differ in the last bit, and a load come a task later."""
    made = rounds_made("streaming", monkeypatch)
    workload = Workload(seq_len=8192, chunk_tokens=8192, chunks_per_round=1, rounds_per_step=6)
    caps = Caps(device_bytes=24 * 2**30, host_bytes=200 * 2**30)
    plan_chain(lower(load_preset("8b"), workload), load_machine("h100"), caps, "streaming")
    assert max(made) <= JUDGED_ROUNDS + 1
