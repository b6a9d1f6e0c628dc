"""Seconds to plan and to bound; `pytest -m bench -s tests/bench/test_bench_planning.py`."""

import gc
import time
from functools import cache

import pytest

from tests.helpers.planning import plan_step
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_model
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.request import TrainingStep, caps_of
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import SteadyState, simulate_rank, steady_state

pytestmark = pytest.mark.bench
H100 = load_machine("h100")
MIB = 2**20
# machine, model, sequence length, tokens a step, device and host cap in GiB
STEPS = [
    ("h100", "8b", 8192, 38 * 8192, 24, 100),
    ("h100", "8b", 8192, 32 * 8192, 9, 100),
    ("h100", "8b", 8192, 32 * 8192, 8, 100),
    ("h100", "32b", 65536, 2 * 65536, 60, 400),
    ("h100", "8b", 1048576, 1048576, 24, 500),
]
# small steps of one round, in which nothing hides the optimizer's copies
STEPS += [
    *(("h100", "8b", 2048, n, device, 256) for n in (4096, 8192) for device in (12, 16, 24, 40)),
    ("h200", "8b", 2048, 4096, 16, 256),
    ("a100", "8b", 2048, 8192, 40, 256),
    ("rtx5090", "8b", 2048, 4096, 16, 256),
    ("rtx3090", "8b", 2048, 4096, 12, 128),
    ("h100", "1b", 2048, 8192, 6, 256),
    ("rtx5090", "1b", 2048, 8192, 6, 256),
    ("h100", "8b", 4096, 16384, 40, 256),
    ("h100", "15b", 8192, 16384, 12, 256),
    ("h200", "15b", 8192, 16384, 16, 256),
]


@pytest.mark.parametrize(("machine", "model", "seq_len", "tokens", "device", "host"), STEPS)
def test_seconds_to_plan(machine, model, seq_len, tokens, device, host):
    simulated, on = 0, load_machine(machine)

    def evaluator(schedule: RankSchedule, machine: Machine) -> SteadyState:
        nonlocal simulated
        simulated += 1
        return steady_state(schedule, machine)

    gc.collect()
    caps = caps_of(on, f"{device}GiB", f"{host}GiB")
    step = TrainingStep(seq_len=seq_len, tokens_per_step=tokens)
    start_s = time.perf_counter()
    schedule = plan_step(load_model(model), step, on, caps, evaluator=evaluator)
    seconds = time.perf_counter() - start_s
    step_s = simulate_rank(schedule, on).step_ns / 1e9
    workload, bound = schedule.workload, schedule.bound
    assert bound is not None and bound.family_step_s is not None
    assert bound.family_step_s <= bound.step_s <= step_s
    tasks = sum(isinstance(op, Compute) for op in schedule.ops)
    print(
        f"\n| {machine} {model}, {tokens // seq_len} x {seq_len:,}, {device} + {host} | "
        f"{workload.rounds_per_step} x {workload.chunks_per_round} x {workload.chunk_tokens:,} | "
        f"{tokens / step_s:,.0f} | {step_s / bound.step_s - 1:.1%} | "
        f"{step_s / bound.family_step_s - 1:.1%} | {tasks:,} | {simulated} | {seconds:.1f} s |"
    )


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_seconds_to_bound_64_layers(chunks):
    workload = Workload(seq_len=8192, chunk_tokens=8192, chunks_per_round=chunks, rounds_per_step=1)
    chain = lower(load_model("32b"), workload)
    gc.collect()  # what earlier tests left
    start_s = time.perf_counter()
    bound = lower_bound(chain, H100, caps_of(H100, "60GiB", "400GiB"))
    seconds = time.perf_counter() - start_s
    assert bound is not None
    print(f"\n| 64 layers x {chunks} chunks | {len(chain.tasks)} tasks | {seconds:.2f} s |")


# model, sequence length, tokens a step, and caps in GiB that are too small
REFUSED = [
    ("8b", 8192, 38 * 8192, 16, 40),
    ("32b", 2048, 128 * 2048, 64, 180),
    ("32b", 8192, 32 * 8192, 64, 180),
    ("8b", 131072, 4 * 131072, 8, 100),
    ("32b", 131072, 2 * 131072, 16, 300),
    ("8b", 1048576, 1048576, 24, 500),
]


@pytest.mark.parametrize("case", REFUSED)
def test_seconds_to_refuse(case):
    """With the kernels of the command line."""
    gc.collect()
    start_s = time.perf_counter()
    would_do = named(*case)
    seconds = time.perf_counter() - start_s
    model, seq_len, tokens, device, host = case
    print(
        f"\n| {model}, {tokens // seq_len} x {seq_len:,}, {device} + {host} | "
        f"{would_do[0] or '-'} | {would_do[1] or '-'} | {seconds:.1f} s |"
    )


@pytest.mark.parametrize("side", ["device", "host"])
@pytest.mark.parametrize("case", REFUSED)
def test_the_caps_that_a_refusal_names_would_do(case, side):
    on_device, on_host = named(*case)
    *step, device, host = case
    if side == "device" and on_device:
        assert verify_rank(planned(*step, on_device, f"{host}GiB")) == []
    if side == "host" and on_host:
        assert verify_rank(planned(*step, f"{device}GiB", on_host)) == []


@cache
def named(
    model: str, seq_len: int, tokens: int, device: int, host: int
) -> tuple[str | None, str | None]:
    """The device and the host cap that would do, in MiB."""
    with pytest.raises(InfeasiblePlan) as refused:
        planned(model, seq_len, tokens, f"{device}GiB", f"{host}GiB")
    short = refused.value.shortage
    sizes = short.enough_device_bytes, short.enough_host_bytes
    on_device, on_host = (size and f"{-(-size // MIB)}MiB" for size in sizes)
    return on_device, on_host


def planned(model: str, seq_len: int, tokens: int, device_mem: str, host_mem: str) -> RankSchedule:
    recipe = Recipe(kernels=KernelChoice(vector="triton", attention="sdpa_flash"))
    step = TrainingStep(seq_len=seq_len, tokens_per_step=tokens, recipe=recipe)
    # What would do may be more than it has.
    roomy = override(H100, {"device_memory_bytes": 2**40, "host_memory_bytes": 2**42})
    return plan_step(load_model(model), step, H100, caps_of(roomy, device_mem, host_mem))
