"""Rule-based policies plan a few rounds; what all rounds take to plan does not grow with them."""

from importlib import import_module

import pytest

from tests.helpers.planning import plan_chain
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.emit import unrolling
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.lifetimes.rounds import SIMULATED_ROUNDS
from twinstream.planner.pack.placement import Placement
from twinstream.planner.policies import optimizer_place
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
    return lower(small("tiny", num_layers=4), workload, Recipe(optimizer=optimizer_place(policy)))


def caps_of(policy: str) -> Caps:
    """Tight for the one that adapts to them."""
    return Caps(device_bytes=500 * KIB) if policy == "streaming" else Caps()


def rounds_made(policy: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many rounds the schedules are that a policy makes from now on."""
    found: list[int] = []

    def recorded(placement: Placement, *others: object) -> Emitted:
        found.append(len(placement.chain.round_starts))
        return emitted(placement, *others)  # type: ignore[arg-type]

    module = import_module(f"twinstream.planner.rules.{policy}")
    monkeypatch.setattr(module, "emitted", recorded)
    return found


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_all_rounds_are_planned_as_a_few(monkeypatch, policy, cut):
    """And it is the plan that they come to one by one."""
    made = rounds_made(policy, monkeypatch)
    chain, caps = chain_of(policy, cut, 9), caps_of(policy)
    schedule = plan_chain(chain, MACHINE, caps, policy)
    assert made and max(made) <= SIMULATED_ROUNDS + 1
    made.clear()
    monkeypatch.setattr(unrolling, "unrolled", lambda *_: None)
    assert plan_chain(chain, MACHINE, caps, policy) == schedule
    assert made[-1] == 9


@pytest.mark.parametrize(
    "caps", [Caps(device_bytes=100 * KIB), Caps(host_bytes=0), Caps(host_bytes=550 * KIB)]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_refusal_says_where_all_rounds_do_not_fit(monkeypatch, policy, caps):
    """At the first middle round where the few say a middle one, at the last where the last."""
    chain = chain_of(policy, "slices", 9)

    def shortage() -> Shortage | None:
        try:
            plan_chain(chain, MACHINE, caps, policy)
        except InfeasiblePlan as error:
            return error.shortage
        return None

    of_few = shortage()
    monkeypatch.setattr(unrolling, "SIMULATED_ROUNDS", 9)
    assert of_few == shortage()


@pytest.mark.parametrize(
    ("of_few", "of_all"),
    [
        ("r0.embed_forward.0", "r0.embed_forward.0"),
        ("r2.block_forward.1.0", "r1.block_forward.1.0"),
        ("r3.block.1.0.recompute.INPUT", "r8.block.1.0.recompute.INPUT"),
        ("optimizer.0", "optimizer.0"),
    ],
)
def test_a_task_of_few_rounds_stands_for_one_of_all(of_few, of_all):
    def refused(chain: Chain) -> Emitted:
        names = [task.task_id for task in (*chain.tasks, *(r.task for r in chain.recomputes))]
        assert of_few in names
        raise InfeasiblePlan(Shortage("any", "device", 1, 2, of_few, 3, None))

    with pytest.raises(InfeasiblePlan) as error:
        unrolling.repeated(refused, chain_of("resident", "one chunk", 9))
    assert error.value.shortage == Shortage("any", "device", 1, 2, of_all, 3, None)


def test_margins_of_whole_blocks_are_as_long_in_every_round(monkeypatch):
    """Sums of fractions of a ns would differ in the last bit, and a load come a task later."""
    made = rounds_made("streaming", monkeypatch)
    workload = Workload(seq_len=8192, chunk_tokens=8192, chunks_per_round=1, rounds_per_step=6)
    caps = Caps(device_bytes=24 * 2**30, host_bytes=200 * 2**30)
    plan_chain(lower(load_preset("8b"), workload), load_machine("h100"), caps, "streaming")
    assert max(made) <= SIMULATED_ROUNDS + 1
