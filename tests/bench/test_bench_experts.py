"""A block of experts beside the dense block with as many active FLOPs, on this CPU."""

import time

import pytest
import torch

from tests.executor.kernels.driver import Step
from twinstream.executor.state.training_state import initial_state
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.options import Experts
from twinstream.models.recipes.recipe import Recipe

TOKENS, WIDTH, D_FF, TURNS = 512, 512, 128, 7
DENSE = ModelSpec(
    name="dense", num_layers=1, d_model=WIDTH, num_heads=8, num_kv_heads=4, head_dim=64,
    d_ff=8 * D_FF, vocab_size=64, dtype="float32",
)  # fmt: skip


def step_of(experts: Experts | None) -> Step:
    """One layer on 512 tokens: with experts 4,096 rows, 8 a token."""
    spec = DENSE.model_copy(update={"experts": experts})
    state = initial_state(spec, 0, Recipe())
    params = {n.removeprefix("param."): f for n, f in state.items() if n.startswith("param.")}
    tokens = torch.randint(0, 64, (2, TOKENS))
    step = Step(spec, params, tokens, TOKENS, TOKENS, 1.0 / TOKENS)
    step.run()
    return step


def seconds(step: Step) -> float:
    """Of the block's forward and backward."""
    total = 0.0
    for task in step.chain.tasks:
        if task.label.kind in ("block_forward", "block_backward"):
            begun = time.perf_counter()
            step._run(task)
            total += time.perf_counter() - begun
    return total


@pytest.mark.bench
def test_bench_experts_beside_a_dense_block(capsys):
    """Forward and backward, over the dense block's time: the best of some turns, in turn."""
    torch.set_num_threads(1)
    steps = {0: step_of(None)}
    steps |= {n: step_of(Experts(count=n, per_token=8, d_ff=D_FF)) for n in (8, 16, 64, 128)}
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(TURNS):
        for count, step in steps.items():
            best[count] = min(best[count], seconds(step))
    with capsys.disabled():
        dense = best.pop(0)
        print(f"\ndense: {dense * 1e3:.1f} ms")
        for count, found in best.items():
            print(f"{count} experts: {found / dense:.2f}")
