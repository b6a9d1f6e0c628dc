"""Prediction error of the CPU backend over a fixed set of configurations, before and after
calibration with three of them.

make bench  (or: pytest -m bench -s tests/bench/test_bench_cpu_prediction.py)
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median

import pytest
import torch

import twinstream as ts
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.probe.cpu import cpu_pace, probe_cpu
from twinstream.executor.probe.tasks.chain_memory import ChainMemory, in_order
from twinstream.executor.probe.timing.timing import median_ns
from twinstream.fidelity.timeline_fit import fit_timelines
from twinstream.hardware_profiles.cost import call_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.options import Experts
from twinstream.models.presets import load_preset
from twinstream.models.recipe import BEFORE_NEXT_USE, KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.request import TrainingStep
from twinstream.schedule.timeline import RankTimeline
from twinstream.schedule.workload import Workload


@dataclass(frozen=True)
class Case:
    """A workload, and the device caps to run it under: shares of what `resident` needs."""

    layers: int
    d_model: int
    seq_len: int
    chunk_tokens: int
    chunks: int
    rounds: int
    experts: int = 0


# Widths and lengths from small to large, packed and sliced, one to four rounds.
CASES = (
    Case(4, 128, 128, 256, 2, 2),
    Case(4, 256, 256, 512, 2, 2),
    Case(6, 256, 512, 256, 4, 1),
    Case(4, 512, 512, 512, 1, 2),
    Case(2, 512, 1024, 512, 2, 1),
)
# 2 experts a token, of half a dense block's width each.
EXPERT_CASES = (
    Case(4, 128, 128, 256, 2, 2, experts=8),
    Case(4, 256, 256, 512, 2, 2, experts=8),
    Case(4, 256, 256, 512, 2, 2, experts=32),
    Case(2, 512, 512, 512, 1, 2, experts=16),
)
UPDATES = {
    "as usual": Recipe(clips=True, kernels=KernelChoice()),
    "before the next use": Recipe(clips=True, kernels=KernelChoice(), optimizer=BEFORE_NEXT_USE),
    "8-bit": Recipe(clips=True, kernels=KernelChoice(), optimizer_state="8bit"),
}
_OWN_RATES = ("adamw_", "gradient_squares")
DEVICE_SHARES = (None, 0.6, 0.4)
NUM_STEPS = 4
# Rows to calibrate with: every fifth from the third on. They are of the smallest, the middle and
# the largest workload, and of all three caps.
CALIBRATION_ROWS = (2, 7, 12)
# A run whose kernels had a core for less than this share of their time was disturbed by others,
# and is made again.
LEAST_CORE_SHARE = 0.95
MOST_RUNS = 3


@dataclass(frozen=True)
class Row:
    """A configuration as run."""

    case: Case
    share: float | None
    schedule: ts.Schedule
    timeline: RankTimeline
    losses: tuple[float, ...]
    num_runs: int

    def step_ns(self, machine: Machine) -> float:
        return ts.simulate(self.schedule, machine).step_ns

    def error(self, machine: Machine) -> float:
        return self.step_ns(machine) / self.timeline.step_ns - 1.0


@pytest.mark.bench
def test_bench_cpu_predictions_against_measured_steps(capsys: pytest.CaptureFixture[str]) -> None:
    probed = probe_cpu()
    rows = [_measured(case, share, probed) for case in CASES for share in DEVICE_SHARES]
    pace = cpu_pace(probed)
    fit = fit_timelines(probed, [(rows[i].schedule, rows[i].timeline) for i in CALIBRATION_ROWS])
    calibrated = fit.machine("cpu-calibrated", "three rows")
    with capsys.disabled():
        print("\n| case | policy, device cap | copies | measured ms | probed | | calibrated | |")
        print("|---|---|---|---|---|---|---|---|")
        for number, row in enumerate(rows):
            print(_line(row, probed, calibrated, "*" if number in CALIBRATION_ROWS else ""))
        held_out = [row for i, row in enumerate(rows) if i not in CALIBRATION_ROWS]
        for what, some in (("15 configurations", rows), ("12 not calibrated with", held_out)):
            print(f"{what}: probed {_told(some, probed)}; calibrated {_told(some, calibrated)}")
        factors = ", ".join(
            f"{p.parameter.name} {p.factor:.3f}" for p in fit.parameters if p.identified
        )
        print(f"calibration: {factors}; the probe repeated after the runs: {pace:.2f} of its speed")
    for case in CASES:
        losses = {row.losses for row in rows if row.case == case}
        assert len(losses) == 1, f"{case}: losses depend on the cap"


@pytest.mark.bench
def test_bench_cpu_predictions_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    probed = probe_cpu()
    rows = [_measured(case, share, probed) for case in EXPERT_CASES for share in (None, 0.5)]
    with capsys.disabled():
        print("\n| case | policy, device cap | copies | measured ms | probed | |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            experts = f"| {row.case.experts} experts, "
            print(experts + " | ".join(_line(row, probed, probed, "")[2:].split(" | ")[:6]) + " |")
        print(f"{len(rows)} configurations: {_told(rows, probed)}")


@pytest.mark.bench
def test_bench_cpu_predictions_of_updates(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels of the optimizer alone, by their core time, at sizes that the probe has not seen.

    *before* is what they were priced at without rates of their own: every update at that of AdamW's
    plain pass, squares of gradients as elementwise work.
    """
    probed = probe_cpu()
    rates = {key: c for key, c in probed.efficiency.items() if not key.startswith(_OWN_RATES)}
    before = probed.model_copy(update={"efficiency": rates})
    with capsys.disabled():
        print("\n| update, width | experts | kernel | tasks | measured ms | probed | before |")
        print("|---|---|---|---|---|---|---|")
        for what, recipe in UPDATES.items():
            for case in (CASES[1], CASES[3], EXPERT_CASES[2]):
                with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(1)) as pool:
                    found = pool.submit(_optimizer_ns, case, recipe, (probed, before)).result()
                for kernel, (number, measured, *priced) in found.items():
                    errors = " | ".join(f"{ns / measured - 1:+.0%}" for ns in priced)
                    print(
                        f"| {what}, {case.d_model} | {case.experts} | {kernel} | {number:.0f} | "
                        f"{measured / 1e6:.1f} | {errors} |"
                    )


def _optimizer_ns(
    case: Case, recipe: Recipe, machines: Sequence[Machine]
) -> dict[str, tuple[float, ...]]:
    """By kernel: how many tasks, what they take together, and what each machine says of that."""
    workload = Workload(
        seq_len=case.seq_len, chunk_tokens=case.chunk_tokens, chunks_per_round=1, rounds_per_step=1
    )
    chain = lower(_spec(case), workload, recipe)
    memory = ChainMemory(chain, torch.device("cpu"))
    if recipe.optimizer == BEFORE_NEXT_USE:
        memory.buffer("update_state").copy_(memory.buffer("step_state"))
    found: dict[str, tuple[float, ...]] = {}
    with torch.no_grad():
        for task in in_order(chain):
            call = chain.calls[task.call]
            run = registered_kernel(call.kernel)(memory.operands(task), call.attributes)
            run()
            if task.label.kind not in ("optimizer_step", "gradient_squares"):
                continue
            priced = (call_alone_ns(call, machine) for machine in machines)
            kernel = call.kernel.partition("/")[0]
            sums = found.get(kernel, (0.0,) * (2 + len(machines)))
            taken = (1.0, median_ns(run), *priced)
            found[kernel] = tuple(a + b for a, b in zip(sums, taken, strict=True))
    return found


def _measured(case: Case, share: float | None, machine: Machine) -> Row:
    schedule = _plan(case, machine, None)
    if share is not None:
        timeline = ts.simulate(schedule, machine)
        need = ts.summarize(schedule, timeline, machine).device_peak_bytes
        schedule = _plan(case, machine, int(need * share))
    num_runs, core_share = 0, 0.0
    while core_share < LEAST_CORE_SHARE and num_runs < MOST_RUNS:
        run = ts.execute(schedule, ts.RunSettings(backend="cpu", num_steps=NUM_STEPS))
        core_share = run.timeline.provenance.processor_share or 1.0
        num_runs += 1
    return Row(case, share, schedule, run.timeline, tuple(run.losses), num_runs)


def _plan(case: Case, machine: Machine, device_bytes: int | None) -> ts.Schedule:
    step = TrainingStep(
        seq_len=case.seq_len,
        tokens_per_step=case.chunk_tokens * case.chunks * case.rounds,
        chunk_tokens=case.chunk_tokens,
        chunks_per_round=case.chunks,
    )
    policy = "resident" if device_bytes is None else "streaming"
    return ts.plan(_spec(case), machine, step=step, device_mem=device_bytes, policy=policy)


def _spec(case: Case) -> ModelSpec:
    spec = load_preset("tiny").model_copy(
        update={
            "num_layers": case.layers,
            "d_model": case.d_model,
            "num_heads": case.d_model // 32,
            "num_kv_heads": case.d_model // 64,
            "d_ff": 3 * case.d_model,
        }
    )
    if case.experts:
        experts = Experts(count=case.experts, per_token=2, d_ff=3 * case.d_model // 2)
        spec = spec.model_copy(update={"experts": experts})
    return spec


def _line(row: Row, probed: Machine, calibrated: Machine, mark: str) -> str:
    case = row.case
    what = "resident" if row.share is None else f"streaming, {row.share:.0%} of resident"
    copies = sum(op.kind == "copy" for op in row.schedule.ops)
    size = f"{case.layers} x {case.d_model}, S {case.seq_len}"
    cut = f"{case.rounds} x {case.chunks} x {case.chunk_tokens}"
    again = f" ({row.num_runs} runs)" if row.num_runs > 1 else ""
    predictions = " | ".join(
        f"{row.step_ns(machine) / 1e6:.0f} | {row.error(machine):+.1%}"
        for machine in (probed, calibrated)
    )
    return (
        f"| {size}, {cut} | {what}{mark} | {copies} | {row.timeline.step_ns / 1e6:.0f}{again} | "
        f"{predictions} |"
    )


def _told(rows: Sequence[Row], machine: Machine) -> str:
    errors = [row.error(machine) for row in rows]
    absolute = [abs(error) for error in errors]
    return (
        f"mean |error| {fmean(absolute):.1%}, median {median(absolute):.1%}, worst "
        f"{max(absolute):.1%}, range {min(errors):+.1%} to {max(errors):+.1%}"
    )
