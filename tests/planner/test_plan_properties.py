"""What holds of every plan of `optimal`, whatever the chain, the machine and the caps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.machines_for_plans import fast_link_machine, slow_link_machine
from tests.helpers.planning import plan_step
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.executor.memory.arenas import Arenas
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.planner.choices import Choices
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.request import TrainingStep
from twinstream.schedule.analysis.occupancy import memory_over_time
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.simulator.replay import simulate_rank

KIB = 1024
MACHINES = [MACHINE, fast_link_machine(), slow_link_machine()]
STEPS = st.sampled_from(
    [
        TrainingStep(seq_len=64, tokens_per_step=256),
        TrainingStep(seq_len=64, tokens_per_step=128, chunk_tokens=32, chunks_per_round=2),
        TrainingStep(seq_len=32, tokens_per_step=192, chunk_tokens=64),
        TrainingStep(seq_len=48, tokens_per_step=96, chunk_tokens=16, chunks_per_round=3),
    ]
)
SPECS = st.builds(
    lambda preset, layers, width: small(preset, num_layers=layers, d_ff=width),
    st.sampled_from(["tiny", "tiny-qwen3"]),
    st.integers(1, 3),
    st.sampled_from([32, 48, 80]),
)
CHOICES = st.sampled_from(
    [
        Choices(),
        Choices(effort="quick"),
        Choices(homes={"optimizer_state": "host"}),
        Choices(recompute="INPUT", prefetch_blocks=1.0),
    ]
)


@settings(max_examples=30, deadline=None)
@given(
    spec=SPECS,
    step=STEPS,
    machine=st.sampled_from(MACHINES),
    device_kib=st.integers(350, 1200),
    host_kib=st.integers(300, 1500),
    choices=CHOICES,
)
def test_a_plan_is_safe_conforms_keeps_the_caps_and_is_no_faster_than_its_bound(
    spec, step, machine: Machine, device_kib, host_kib, choices
):
    caps = Caps(device_bytes=device_kib * KIB, host_bytes=host_kib * KIB)
    try:
        schedule = plan_step(spec, step, machine, caps, "optimal", choices)
    except InfeasiblePlan:
        return
    assert verify_rank(schedule) == []
    assert conforms(schedule, lower(spec, schedule.workload, step.recipe)) == []
    timeline = simulate_rank(schedule, machine)
    assert schedule.bound is not None
    assert schedule.bound.family_step_s is not None
    assert schedule.bound.family_step_s <= schedule.bound.step_s <= timeline.step_ns / 1e9
    executed = Arenas.sizes(schedule)
    for tier, cap in ((DEVICE, caps.device_bytes), (HOST, caps.host_bytes)):
        extent = arena_bytes(schedule, tier)
        assert extent == executed.get(tier, 0)
        assert cap is not None and extent <= cap
        alive = memory_over_time(schedule, timeline.passes[-1], tier)
        assert max((sample.total_bytes for sample in alive), default=0) <= extent


@pytest.mark.parametrize("machine", MACHINES, ids=["cpu", "fast link", "slow link"])
def test_a_plan_is_the_same_when_it_is_made_again(machine):
    step = TrainingStep(seq_len=64, tokens_per_step=192, chunk_tokens=64)

    def planned() -> RankSchedule:
        caps = Caps(device_bytes=420 * KIB, host_bytes=900 * KIB)
        return plan_step(small("tiny"), step, machine, caps)

    assert planned() == planned()
