"""`optimal` beside als244/dataflow on equal terms; benchmarks/quality has the constants.

Its planner plans one cold step. Ours plans the step that repeats: `cold s` is one pass of it, from
empty streams until the last op has ended (`Timeline.cold_ns`), with what is carried on the device
there already. To load that takes `+ load` seconds more where nothing hides it.

pytest tests/bench/test_bench_dataflow.py -m bench -s
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

import twinstream as ts
from benchmarks.quality.dataflow import (
    GIB,
    PURE_COMPUTE_S,
    SEQ_LEN,
    Reference,
    Terms,
    dataflow_machine,
    references,
)
from twinstream.hardware_profiles.cost import call_alone_ns
from twinstream.hardware_profiles.schema import is_compute_unit
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.proof import step_bound
from twinstream.planner.request import TrainingStep
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.workload import Workload

RECIPE = Recipe(kernels=KernelChoice())  # its terms are of torch's own ops
STEADY_FASTER_GIB = (50.0, 35.0, 25.0)
SMALL_STEADY_S, SMALL_STEADY_GIB = 0.70, 80.0
COLUMNS = ("device GiB", "tokens", "rounds x chunks x tokens", "its cold s", "cold s", "+ load",
           "steady s", "faster", "bound s", "gap", "plan s")  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What one cell gave; `cold_s` and `steady_s` contain `added_s`, the bound does not."""

    reference: Reference
    schedule: RankSchedule
    cold_s: float
    steady_s: float
    added_s: float
    bound_s: float
    plan_seconds: float

    @property
    def load_s(self) -> float:
        return carried_bytes(self.schedule) / 55e9

    @property
    def gap(self) -> float:
        return (self.steady_s - self.added_s) / self.bound_s - 1

    def row(self) -> str:
        cut, theirs = self.schedule.workload, self.reference.cold_s
        return _line(
            f"{self.reference.device_gib}",
            f"{self.reference.tokens_per_step:,}",
            f"{cut.rounds_per_step} x {cut.chunks_per_round} x {cut.chunk_tokens}",
            f"{theirs:.2f}",
            f"{self.cold_s:.2f}",
            f"{self.load_s:.2f}",
            f"{self.steady_s:.3f}",
            f"{theirs / self.steady_s - 1:+.1%}",
            f"{self.bound_s:.3f}",
            f"{self.gap:.2%}",
            f"{self.plan_seconds:.1f}",
        )


@pytest.mark.bench
@pytest.mark.parametrize("terms", ["counted", "hidden"])
def test_bench_against_dataflow(terms: Terms, capsys: pytest.CaptureFixture[str]) -> None:
    chain = _chain()
    bound = step_bound(chain, dataflow_machine(terms), Caps())
    assert bound is not None
    added_s = 0.0 if terms == "counted" else max(0.0, PURE_COMPUTE_S - bound.step_s)
    with capsys.disabled():
        print(f"\nvector kernels {terms}: {_compute_told(chain, terms, bound.step_s, added_s)}")
        print(_line(*COLUMNS), "|---" * len(COLUMNS) + "|", sep="\n")
        found, failed = _results(terms, added_s)
        for text, holds in claims(found):
            print(f"{'yes' if holds else 'NO'}: {text}")
    for each in found:  # no step beats the bound, and the bound is no less than matmuls at 0.70
        drained_s = each.cold_s - each.added_s  # passes with a drain after each are a schedule, too
        assert min(each.steady_s - each.added_s, drained_s) >= each.bound_s
        assert each.bound_s > each.schedule.model_flops / (0.70 * 989e12)
    assert not failed, failed


def _results(terms: Terms, added_s: float) -> tuple[list[Result], list[str]]:
    """A row printed per cell; what could not be planned comes back as messages."""
    found: list[Result] = []
    failed: list[str] = []
    for reference in references():
        try:
            found.append(result(reference, terms, added_s))
        except ts.TwinstreamError as error:
            failed.append(f"{reference}: {error}")
            print(_line(f"{reference.device_gib}", f"{reference.tokens_per_step:,}", str(error)))
        else:
            print(found[-1].row(), flush=True)
    return found, failed


def result(reference: Reference, terms: Terms, added_s: float) -> Result:
    machine = dataflow_machine(terms)
    begun = time.perf_counter()
    schedule = ts.plan(
        "8b",
        machine,
        step=TrainingStep(SEQ_LEN, reference.tokens_per_step, recipe=RECIPE),
        device_mem=round(reference.device_gib * GIB),
        policy="optimal",
    )
    seconds = time.perf_counter() - begun
    timeline = ts.simulate(schedule, machine)
    assert schedule.bound is not None
    return Result(
        reference=reference,
        schedule=schedule,
        cold_s=timeline.cold_ns / 1e9 + added_s,
        steady_s=timeline.step_ns / 1e9 + added_s,
        added_s=added_s,
        bound_s=schedule.bound.step_s,
        plan_seconds=seconds,
    )


def claims(found: Sequence[Result]) -> list[tuple[str, bool]]:
    """What issue 3 asks for, and whether it holds; a cell without a plan holds nothing."""
    all_there = len(found) == len(references())
    middle = [each for each in found if each.reference.device_gib in STEADY_FASTER_GIB]
    small = [each for each in found if each.reference.device_gib == SMALL_STEADY_GIB]
    cold = all_there and all(each.cold_s <= each.reference.cold_s for each in found)
    loaded = cold and all(each.cold_s + each.load_s <= each.reference.cold_s for each in found)
    faster = [each.steady_s * 1.05 <= each.reference.cold_s for each in middle]
    return [
        ("the cold pass is not slower in any cell", cold),
        ("nor when it first loads what is carried, with nothing to hide it", loaded),
        (
            "the steady step is faster by 5 % or more from 25 to 50 GiB",
            len(faster) == len(STEADY_FASTER_GIB) and all(faster),
        ),
        (
            f"8,192 tokens at {SMALL_STEADY_GIB:.0f} GiB: steady <= {SMALL_STEADY_S:.2f} s",
            any(each.steady_s <= SMALL_STEADY_S for each in small),
        ),
    ]


def carried_bytes(schedule: RankSchedule) -> int:
    """Bytes on the device at the boundary between passes, filled before the first."""
    tensors = {tensor.tensor_id: tensor.size_bytes for tensor in schedule.tensors}
    on_device = {slot.slot_id for slot in schedule.slots if slot.tier == DEVICE}
    return sum(tensors[item.tensor] for item in schedule.carried if item.slot in on_device)


def _chain() -> Chain:
    """4 rounds of 32,768 tokens; without caps its bound is compute alone."""
    workload = Workload(
        seq_len=SEQ_LEN, chunk_tokens=32_768, chunks_per_round=1, rounds_per_step=4
    )  # fmt: skip
    return lower(load_preset("8b"), workload)


def _compute_told(chain: Chain, terms: Terms, alone_s: float, added_s: float) -> str:
    parts = _seconds_by_unit(chain, terms).items()
    told = ", ".join(f"{unit} {seconds:.3f}" for unit, seconds in parts)
    added = f"; {added_s:.2f} s added to our steps" if added_s else ""
    return f"compute alone {alone_s:.2f} s ({told}), its {PURE_COMPUTE_S:.2f} s{added}"


def _seconds_by_unit(chain: Chain, terms: Terms) -> dict[str, float]:
    """Seconds of the tasks alone by unit of work; vector units but for AdamW are one."""
    machine, found = dataflow_machine(terms), dict[str, float]()
    for task in chain.tasks:
        call = chain.calls[task.call]
        for work in call.cost:
            named = is_compute_unit(work.unit) or work.unit == "adamw"
            unit = work.unit if named else "vector"
            alone_ns = call_alone_ns(call.model_copy(update={"cost": (work,)}), machine)
            found[unit] = found.get(unit, 0.0) + alone_ns / 1e9
    return found


def _line(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"
