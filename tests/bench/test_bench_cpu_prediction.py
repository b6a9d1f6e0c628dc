"""Prediction error of the CPU backend over a fixed set of configurations.

make bench  (or: pytest -m bench -s tests/bench/test_bench_cpu_prediction.py)
"""

from dataclasses import dataclass
from statistics import fmean, median

import pytest

import twinstream as ts
from twinstream.executor.probe.cpu import probe_cpu
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.presets import load_preset
from twinstream.planner.chunking import TrainingStep


@dataclass(frozen=True)
class Case:
    """A workload, and the device caps to run it under: shares of what `resident` needs."""

    layers: int
    d_model: int
    seq_len: int
    chunk_tokens: int
    chunks: int
    rounds: int


# Widths and lengths from small to large, packed and sliced, one to four rounds.
CASES = (
    Case(4, 128, 128, 256, 2, 2),
    Case(4, 256, 256, 512, 2, 2),
    Case(6, 256, 512, 256, 4, 1),
    Case(4, 512, 512, 512, 1, 2),
    Case(2, 512, 1024, 512, 2, 1),
)
DEVICE_SHARES = (None, 0.6, 0.4)
NUM_STEPS = 4


@pytest.mark.bench
def test_bench_cpu_predictions_against_measured_steps(capsys: pytest.CaptureFixture[str]) -> None:
    machine = probe_cpu()
    rows: list[str] = []
    errors: list[float] = []
    for case in CASES:
        losses = set()
        resident = _plan(case, machine, None)
        need = ts.summarize(resident, ts.simulate(resident, machine), machine).device_peak_bytes
        for share in DEVICE_SHARES:
            cap = None if share is None else int(need * share)
            try:
                schedule = resident if cap is None else _plan(case, machine, cap)
            except ts.TwinstreamError as error:
                rows.append(f"| {case} | {share} | infeasible: {error} |")
                continue
            predicted = ts.simulate(schedule, machine)
            run = ts.execute(schedule, ts.RunSettings(backend="cpu", num_steps=NUM_STEPS))
            losses.add(run.losses)
            step = ts.compare(schedule, predicted, run.timeline).step_ns
            errors.append(step.error)
            rows.append(_row(case, share, schedule, step.predicted, step.measured))
        assert len(losses) == 1, f"{case}: losses depend on the cap"
    with capsys.disabled():
        print("\n| case | policy, device cap | copies | predicted ms | measured ms | error |")
        print("|---|---|---|---|---|---|")
        print("\n".join(rows))
        absolute = [abs(error) for error in errors]
        print(
            f"{len(errors)} configurations: mean |error| {fmean(absolute):.1%}, "
            f"median {median(absolute):.1%}, worst {max(absolute):.1%}, "
            f"range {min(errors):+.1%} to {max(errors):+.1%}"
        )
    assert len(errors) >= 12


def _plan(case: Case, machine: Machine, device_bytes: int | None) -> ts.Schedule:
    spec = load_preset("tiny").model_copy(
        update={
            "num_layers": case.layers,
            "d_model": case.d_model,
            "num_heads": case.d_model // 32,
            "num_kv_heads": case.d_model // 64,
            "d_ff": 3 * case.d_model,
        }
    )
    step = TrainingStep(
        seq_len=case.seq_len,
        tokens_per_step=case.chunk_tokens * case.chunks * case.rounds,
        chunk_tokens=case.chunk_tokens,
        chunks_per_round=case.chunks,
    )
    policy = "resident" if device_bytes is None else "streaming"
    return ts.plan(spec, machine, step=step, device_mem=device_bytes, policy=policy)


def _row(
    case: Case, share: float | None, schedule: ts.Schedule, predicted: float, measured: float
) -> str:
    what = "resident" if share is None else f"streaming, {share:.0%} of resident"
    copies = sum(op.kind == "copy" for op in schedule.ops)
    size = f"{case.layers} x {case.d_model}, S {case.seq_len}"
    cut = f"{case.rounds} x {case.chunks} x {case.chunk_tokens}"
    return (
        f"| {size}, {cut} | {what} | {copies} | {predicted / 1e6:.0f} | {measured / 1e6:.0f} | "
        f"{predicted / measured - 1:+.0%} |"
    )
