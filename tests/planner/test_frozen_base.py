"""Plans of chains whose parameters are frozen: read-only streams, or there all the time."""

from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.choices import Choices
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.ops import Copy
from twinstream.simulator.replay import steady_state

LORA = Recipe(lora=lora_of("r=16"))
BASE = ("param.embedding", "param.0", "param.7", "param.15", "param.head")


def planned(device_mem: str, recipe: Recipe = LORA):
    """A plan of a 1B model on an H100, and tokens/s."""
    step = TrainingStep(2048, 8192, recipe=recipe)
    request = PlanRequest.of(
        "1b", "h100", step=step, device_mem=device_mem, host_mem="32GiB",
        choices=Choices(effort="quick"),
    )  # fmt: skip
    plan = Planner(steady_state).plan(request, name_caps=False)
    return plan, 8192e9 / steady_state(plan, load_machine("h100")).step.step_ns


def test_the_bound_and_the_plan_know_what_is_frozen():
    plan, speed = planned("8GiB")
    full, slower = planned("8GiB", Recipe())
    assert speed > 1.2 * slower
    assert plan.bound is not None and full.bound is not None
    assert plan.bound.step_s < full.bound.step_s / 1.2
    # no step is faster than its matmuls at peak: 989 TFLOP/s (NVIDIA H100 SXM datasheet, dense)
    assert plan.model_flops < full.model_flops
    assert 8192 / speed > plan.model_flops / 989e12


def test_a_base_that_does_not_fit_is_a_read_only_stream():
    plan, _ = planned("3GiB")
    copies = [op for op in plan.ops if isinstance(op, Copy)]
    loaded = {op.tensor for op in copies if op.stream.queue == "h2d"}
    assert loaded & set(BASE)
    stored = {op.tensor for op in copies if op.stream.queue == "d2h"}
    assert not {name for name in stored if name.startswith("param.") and "lora" not in name}
    assert {item.tensor for item in plan.carried} >= set(BASE)


def test_a_frozen_base_that_fits_stays():
    """The program would move it for next to nothing, and leave the links no slack."""
    step = TrainingStep(2048, 8192, chunk_tokens=4096, chunks_per_round=1, recipe=LORA)
    request = PlanRequest.of("8b", "h100", step=step, device_mem="24GiB", host_mem="100GiB")
    plan = Planner(steady_state).plan(request, name_caps=False)
    assert plan.bound is not None
    assert steady_state(plan, request.machine).step.step_ns < 1.01 * plan.bound.step_s * 1e9
    loaded = {op.tensor for op in plan.ops if isinstance(op, Copy) and op.stream.queue == "h2d"}
    assert not loaded & {f"param.{layer}" for layer in range(32)}
