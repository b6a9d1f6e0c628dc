"""Traced modules on the CPU: speed beside torch.utils.checkpoint, and prediction after probing.

pytest -m bench -s tests/bench/test_bench_modules.py

A step of one chunk, 4 x 256 tokens, float32, one thread; widths of 256. *Ours* is forward, backward
and loss of the executor's fastest pass of 12, without updates; *checkpoint* the same of the module
with `gradient_checkpointing_enable()`, the fastest of 12, in turns with ours. The step
is predicted with a probe made just before, and measured as its fastest pass: passes of one run
differ by 30 % on a machine that others use, and probes take their fastest, too.
"""

import time
from statistics import fmean
from typing import Any

import pytest
import torch

import twinstream as ts
from tests.traced.families import tiny_config
from tests.traced.test_executed import TEN
from twinstream.executor.modules.building import build_module
from twinstream.executor.modules.tracing import trace
from twinstream.executor.probe.cpu import probe_cpu
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.traced import ModuleSource, TracedModel
from twinstream.planner.request import TrainingStep
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute

BATCH, SEQ_LEN, TURNS = 4, 256, 3
WIDER = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 256),
    **dict.fromkeys(("intermediate_size", "n_inner"), 768),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 256),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1024),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    "head_dim": 64,
}


def model_of(family: str) -> TracedModel:
    known = tiny_config(family)
    wider = {key: value for key, value in WIDER.items() if key in known}
    if family in ("mamba2", "nemotron_h", "deepseek_v3"):  # widths follow from one another
        wider = {key: value for key, value in wider.items() if "pos" in key or "vocab" in key}
    config = tiny_config(family, **wider)
    return trace(ModuleSource(config=config), dtype="float32", seq_len=SEQ_LEN)


def measured(schedule: RankSchedule) -> tuple[float, float]:
    """Seconds of the fastest pass, with updates and without."""
    run = ts.execute(schedule, ts.RunSettings(backend="cpu", num_steps=6))
    computes = [at for at, op in enumerate(schedule.ops) if isinstance(op, Compute)]
    kept = [at for at in computes if schedule.ops[at].label.kind != "optimizer_step"]
    passes = (run.timeline.cold, *run.timeline.passes)
    whole, without = (
        min(sum(spans.end_ns[at] - spans.start_ns[at] for at in some) / 1e9 for spans in passes)
        for some in (computes, kept)
    )
    return whole, without


def checkpointed(module: Any, ids: torch.Tensor) -> float:
    """Seconds of the fastest of four forward and backward passes."""
    best = float("inf")
    for _ in range(4):
        begun = time.perf_counter()
        logits = module(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1)
        ).backward()
        best = min(best, time.perf_counter() - begun)
    return best


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore")
def test_bench_modules(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    machine = probe_cpu()
    errors = []
    with capsys.disabled():
        print("\n| family | ours ms | checkpoint ms | ratio | predicted / measured step |")
        print("|---|---|---|---|---|")
    for family in TEN:
        ours_s, theirs_s, error = row_of(family, machine)
        errors.append(error)
        with capsys.disabled():
            print(
                f"| {family} | {1e3 * ours_s:.1f} | {1e3 * theirs_s:.1f} | "
                f"{ours_s / theirs_s:.2f} | {error:+.1%} |"
            )
    with capsys.disabled():
        sizes = [abs(error) for error in errors]
        print(f"mean error {fmean(sizes):.1%}, worst {max(sizes):.1%}")


def row_of(family: str, machine: Machine) -> tuple[float, float, float]:
    model = model_of(family)
    tokens = BATCH * SEQ_LEN
    step = TrainingStep(SEQ_LEN, tokens, tokens, 1, recipe=Recipe(kernels=KernelChoice()))
    schedule = ts.plan(model, machine, step=step, policy="resident")
    predicted_ns = ts.simulate(schedule, machine).step_ns
    module: Any = build_module(model.source, torch.float32, model.attention, with_parameters=True)
    module.gradient_checkpointing_enable()
    ids = torch.randint(0, model.vocab_size, (BATCH, SEQ_LEN))
    ours_s = theirs_s = step_s = float("inf")
    for _ in range(TURNS):
        whole, seconds = measured(schedule)
        ours_s, step_s = min(ours_s, seconds), min(step_s, whole)
        theirs_s = min(theirs_s, checkpointed(module, ids))
    return ours_s, theirs_s, predicted_ns / 1e9 / step_s - 1.0
