"""A measured short step beside its own plan, and what two terms say of a timeline."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.gpu.jobs.campaign import campaign_of
from benchmarks.gpu.jobs.results import KernelsFound, Outcome, Results
from benchmarks.gpu.jobs.store import CampaignError
from benchmarks.gpu.report import like_with_like
from benchmarks.gpu.report.like_with_like import Compared, compared, plan_of, table
from benchmarks.gpu.report.terms import Ran, error_of, given_back, rates_at_once
from benchmarks.gpu.tests.stand_ins import WHERE
from benchmarks.gpu.tests.test_table import CELL
from twinstream.api import simulate
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.schedule.ops import Compute

CPU = load_machine("cpu")
TINY = campaign_of("tiny").cells[0]
RECIPE = Recipe(kernels=KernelChoice())


@pytest.fixture(scope="module")
def short():
    """The tiny cell's plan of 4 rounds, and what it and one of 2 take, seconds."""
    whole = plan_of(TINY, RECIPE, CPU)
    plans = [plan_of(TINY.shortened(whole.workload, n), RECIPE, CPU) for n in (2, 4)]
    seconds = [simulate(one, CPU).step_ns / 1e9 for one in (whole, *plans)]
    return plans[1], whole.workload.rounds_per_step, seconds


def results(measured) -> Results:
    chosen = KernelsFound(kernels=KernelChoice(), notes=(), excess_bytes=0)
    outcomes = {TINY.key: Outcome(status="done", found=measured),
                "kernels": Outcome(status="done", found=chosen)}  # fmt: skip
    return Results(where=WHERE, size="full", outcomes=outcomes)


def test_a_measured_step_stands_beside_its_own_plan(short, monkeypatch):
    plan = SimpleNamespace(cells=(TINY,))
    monkeypatch.setattr(like_with_like, "campaign_of", lambda *given: plan)
    _, rounds, (whole_s, few_s, more_s) = short
    changes = {"short_steps_s": (few_s, 1.25 * more_s), "predicted_step_s": whole_s}
    slower = override(CPU, {"pcie_duplex_bytes_per_s": 8e9, "peak_fp32_flop_per_s": 1e10})
    (found,) = compared(results(CELL.model_copy(update=changes)), CPU, [CPU, slower], None)
    assert found.errors[0] == pytest.approx(1 / 1.25 - 1)
    assert found.errors[1] > found.errors[0]
    extended = few_s + (rounds - 2) * (more_s - few_s) / 2
    assert found.extension_bias == pytest.approx(extended / whole_s - 1)
    assert found.plan_change == 0
    with pytest.raises(CampaignError, match="no probe of a CUDA device"):
        compared(Results(where=WHERE, size="full", outcomes={}), CPU, [CPU], None)


def test_the_table_has_an_error_for_each_profile_and_says_what_changed():
    rows = [Compared("8b a", 4, 2.0, (1.9, 2.1), 0.01, 0.0),
            Compared("8b b", 4, 4.0, (4.4, 4.0), -0.02, -0.004)]  # fmt: skip
    lines = table(rows, ["old", "new"]).splitlines()
    assert lines[0] == "| cell | measured s | error of old | error of new | extension | plan |"
    assert lines[2:4] == [
        "| 8b a | 2.000 | -5.0 % | +5.0 % | +1.0 % | same |",
        "| 8b b | 4.000 | +10.0 % | +0.0 % | -2.0 % | -0.4 % |",
    ]
    assert lines[4] == "| 8b: mean, worst | | 7.5 %, 10.0 % | 2.5 %, 5.0 % | | |"


def test_a_timeline_without_the_terms_has_none(short):
    schedule, _, (*_, seconds) = short
    spans = simulate(schedule, CPU).passes[-1]
    starts = np.array(spans.start_ns, float) - min(spans.start_ns)
    took = np.array(spans.end_ns, float) - np.array(spans.start_ns, float)
    ran = Ran("tiny", schedule, starts, took, seconds)
    assert error_of(ran, CPU, 0.0) == pytest.approx(0.0, abs=1e-6)
    assert error_of(ran, CPU, 0.5) <= 0.0
    assert given_back([ran], CPU) == pytest.approx(0.0, abs=0.02)
    assert sum(isinstance(op, Compute) for op in schedule.ops) == len(ran.computes)
    assert rates_at_once([ran]) == {}, "there is no copy of 16 MiB"
