"""What LoRA gains over full training, and what streaming its base costs, as predicted."""

import pytest

from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.adapters.lora import Lora, lora_of
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import RankSchedule
from twinstream.simulator.replay import steady_state

MODEL, MACHINE, SEQ_LEN = "8b", "h100", 2048
LIMITS = {"device_mem": "24GiB", "host_mem": "100GiB"}
LORA = lora_of("r=16,alpha=32")
WHAT = {
    "full training": (None, OPEN),
    "LoRA": (LORA, OPEN),
    "LoRA, base resident": (LORA, Choices(homes={"parameter": "device"})),
    "LoRA, base streamed": (LORA, Choices(homes={"parameter": "host"})),
}


@pytest.mark.bench
@pytest.mark.parametrize(
    ("tokens_per_step", "attention"),
    [
        (4096, None), (8192, None), (16_384, None), (65_536, None), (65_536, "flash3"),
        (None, None), (None, "flash3"),
    ],
)  # fmt: skip
def test_bench_lora_against_full_training(tokens_per_step, attention, capsys):
    """`None` are as many tokens as the planner proposes, which are fewer with LoRA."""
    speeds = {}
    for name, (lora, choices) in WHAT.items():
        plan = planned(tokens_per_step, attention, lora, choices)
        speeds[name] = speed_of(plan)
        work = plan.workload
        assert plan.bound is not None
        bound = work.tokens_per_step / plan.bound.step_s
        with capsys.disabled():
            print(
                f"\n{name}, {attention or 'sdpa_flash'}: {work.tokens_per_step:,} tokens a step, "
                f"{work.rounds_per_step} x "
                f"{work.chunks_per_round} x {work.chunk_tokens}: {speeds[name]:,.0f} tokens/s, "
                f"at most {bound:,.0f}"
            )
    gain = speeds["LoRA"] / speeds["full training"]
    loss = 1 - speeds["LoRA, base streamed"] / speeds["LoRA, base resident"]
    with capsys.disabled():
        print(f"LoRA {gain:.3f} times full training; streamed {loss:.1%} slower than resident")
    assert gain > 1.2


def planned(
    tokens_per_step: int | None, attention: str | None, lora: Lora | None, choices: Choices
) -> RankSchedule:
    """`None` of attention is what the planner takes for this machine by itself."""
    kernels = attention and KernelChoice(vector="triton", attention=attention)
    step = TrainingStep(SEQ_LEN, tokens_per_step, recipe=Recipe(lora=lora, kernels=kernels))
    request = PlanRequest.of(MODEL, MACHINE, step=step, **LIMITS, choices=choices)
    return Planner(steady_state).plan(request, name_caps=False).only


def speed_of(plan: RankSchedule) -> float:
    """Tokens/s, as simulated."""
    step_ns = steady_state(plan, load_machine(MACHINE)).step.step_ns
    return plan.workload.tokens_per_step * 1e9 / step_ns
