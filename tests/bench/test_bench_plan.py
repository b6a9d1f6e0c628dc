"""Seconds to plan steps of ever more rounds by rules: only writing them out and proofs may grow.

pytest tests/bench/test_bench_plan.py -m bench -s
"""

import time

import pytest

from tests.helpers.planning import plan_step
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import Recipe
from twinstream.planner.policies import optimizer_place
from twinstream.planner.request import TrainingStep, caps_of
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.simulator.replay import simulate_rank

STREAMED_GIB = 24
# policy, model, device cap in GiB (None: all)
PLANS = [
    ("streaming", "8b", STREAMED_GIB),
    ("layer_offload", "8b", None),
    ("resident", "1b", None),
    ("full_recompute", "1b", None),
    ("optimizer_offload", "1b", None),
]


@pytest.mark.bench
@pytest.mark.parametrize(("policy", "model", "device_gib"), PLANS)
@pytest.mark.parametrize("rounds", [4, 64, 512])
def test_bench_plan_of_many_rounds(rounds, policy, model, device_gib, capsys):
    machine = load_machine("h100")
    caps = caps_of(machine, device_gib and f"{device_gib}GiB", None)
    step = TrainingStep(
        seq_len=8192, chunk_tokens=8192, chunks_per_round=1, tokens_per_step=rounds * 8192
    )  # fmt: skip
    begun = time.perf_counter()
    schedule = plan_step(load_preset(model), step, machine, caps, policy)
    seconds = time.perf_counter() - begun
    chain = lower(load_preset(model), schedule.workload, Recipe(optimizer=optimizer_place(policy)))
    assert verify_rank(schedule) == []
    assert conforms(schedule, chain) == []
    if device_gib is not None:
        assert 0.85 * device_gib < arena_bytes(schedule, DEVICE) / 2**30 <= device_gib
    step_s = simulate_rank(schedule, machine).step_ns / 1e9
    # no step is faster than its matmuls at peak: 989 TFLOP/s (NVIDIA H100 SXM datasheet, dense)
    assert step_s > schedule.model_flops / 989e12
    with capsys.disabled():
        print(
            f"\n| {policy}, {model}, {rounds} x 8,192 | {len(schedule.ops):,} | {step_s:.3f} s | "
            f"{seconds:.1f} s |"
        )
