"""The 37 results of MAD-Max's public program, every field of each, to what it printed."""

from pathlib import Path

import pytest

from benchmarks.accuracy.madmax import cases
from twinstream.layered.madmax import madmax_case, madmax_fields, madmax_step
from twinstream.schedule.errors import ArgumentError

RUNS = Path(__file__).parent / "madmax_runs.json"
CASES = cases(RUNS)
PRINTED_TO = 5.1e-5  # ms: four digits after the point


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_field_is_theirs(case):
    found = madmax_fields(madmax_step(case.model, case.strategy, case.system, case.task))
    assert found.keys() == case.printed.keys()
    for name, value in case.printed.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=PRINTED_TO), name


def test_all_are_there():
    assert len(CASES) == 37
    assert {case.task.name for case in CASES} == {"pretrain", "inference"}


@pytest.mark.parametrize("found", [{}, {"name": "x", "model": {"type": "LLM"}, "task": {}}])
def test_what_is_no_run_is_refused(found):
    with pytest.raises(ArgumentError, match="no run of MAD-Max"):
        madmax_case(found)
