"""What clipping by the norm of all gradients costs, by where the update is.

pytest tests/bench/test_bench_clipping.py -m bench -s
"""

from time import perf_counter

import pytest

from twinstream.models.recipe import OptimizerPlace, Recipe
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.proof.verify import verify_rank
from twinstream.simulator.replay import simulate_rank, steady_state

MOST = 0.02  # of the step without clipping
# model, machine, sequence length, tokens a step, device and host cap
CELL = ("8b", "h100", 8192, 524_288, "24GiB", "100GiB")


def request(optimizer: OptimizerPlace, *, clips: bool) -> PlanRequest:
    model, machine, seq_len, tokens, device_mem, host_mem = CELL
    recipe = Recipe(clips=clips, optimizer=optimizer)
    step = TrainingStep(seq_len=seq_len, tokens_per_step=tokens, recipe=recipe)
    return PlanRequest.of(model, machine, step=step, device_mem=device_mem, host_mem=host_mem)


@pytest.mark.bench
def test_bench_clipping(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        "no clipping": request("device", clips=False),
        "after backward": request("device_after_backward", clips=True),
        "before next use": request("device_before_next_use", clips=True),
        "chosen": request("device", clips=True),
    }
    steps_s: dict[str, float] = {}
    lines = ["", " ".join(map(str, CELL))]
    for name, one in asked.items():
        start_s = perf_counter()
        plan = Planner(steady_state).plan(one).only
        planning_s = perf_counter() - start_s
        assert plan.bound is not None
        steps_s[name] = steady_state(plan, one.machine).step_ns / 1e9
        cost = steps_s[name] / steps_s["no clipping"] - 1
        cut = plan.workload
        lines.append(
            f"{name:16} {steps_s[name]:7.3f} s {cost:+7.2%}, bound {plan.bound.step_s:7.3f} s, "
            f"{cut.rounds_per_step} x {cut.chunks_per_round} x {cut.chunk_tokens:,} tokens, "
            f"{plan.recipe['optimizer']}, planned in {planning_s:.0f} s"
        )
        if (flush := flush_of(plan)) is not None:
            assert verify_rank(flush) == []
            flush_s = simulate_rank(flush, one.machine).cold_ns / 1e9
            lines.append(f"{'':16} a flush takes {flush_s:.3f} s, {len(flush.ops)} ops")
    with capsys.disabled():
        print("\n".join(lines))
    assert steps_s["chosen"] == min(steps_s["after backward"], steps_s["before next use"])
    assert steps_s["chosen"] <= (1 + MOST) * steps_s["no clipping"]
