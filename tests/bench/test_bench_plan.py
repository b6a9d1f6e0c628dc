"""Time to plan 8B at 8,192 tokens a round under 24 GiB; it must not grow faster than the rounds.

pytest tests/bench/test_bench_plan.py -m bench -s
"""

import time

import pytest

from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.lowering import lower
from twinstream.models.presets import load_preset
from twinstream.planner.plan import plan_chain
from twinstream.schedule.conforms import conforms
from twinstream.schedule.document import Caps
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.verify import verify
from twinstream.schedule.verify_layout import arena_bytes
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

DEVICE_BYTES = 24 * 2**30


@pytest.mark.bench
@pytest.mark.parametrize("policy", ["streaming"])
@pytest.mark.parametrize("rounds", [1, 4, 16])
def test_bench_plan_8b(rounds, policy, capsys):
    workload = Workload(
        seq_len=8192, chunk_tokens=8192, chunks_per_round=1, rounds_per_step=rounds
    )  # fmt: skip
    chain, machine = lower(load_preset("8b"), workload), load_machine("h100")
    begun = time.perf_counter()
    schedule = plan_chain(chain, machine, Caps(device_bytes=DEVICE_BYTES), policy)
    seconds = time.perf_counter() - begun
    assert verify(schedule) == []
    assert conforms(schedule, chain) == []
    assert 0.9 * DEVICE_BYTES < arena_bytes(schedule, DEVICE) <= DEVICE_BYTES
    step_s = simulate(schedule, machine).step_ns / 1e9
    # no step is faster than its matmuls at peak: 989 TFLOP/s (NVIDIA H100 SXM datasheet, dense)
    assert step_s > schedule.model_flops / 989e12
    with capsys.disabled():
        print(
            f"\nplan {policy}: 8B, 8,192 tokens x {rounds} round(s), {len(schedule.ops)} ops, "
            f"{seconds:.1f} s; step {step_s:.3f} s"
        )
