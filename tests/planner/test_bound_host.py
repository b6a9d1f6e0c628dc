"""Rows for host memory that are left out change no bound."""

from unittest.mock import patch

import pytest

from tests.helpers.small_chains import small_case
from twinstream.planner.bound.host_rows import Cap, HostRows
from twinstream.planner.bound.lower_bound import lower_bound

NUM_CHAINS = 600


def test_bounds_are_those_with_all_rows_of_the_host():
    asked: list[bool] = []
    left_out = HostRows.may_be_left_out

    def counted(rows: HostRows, cap: Cap | None) -> bool:
        asked.append(left_out(rows, cap))
        return asked[-1]

    for seed in range(NUM_CHAINS):
        case = small_case(seed)
        with patch.object(HostRows, "may_be_left_out", counted):
            found = lower_bound(case.chain, case.machine, case.caps)
        with patch.object(HostRows, "may_be_left_out", lambda rows, cap: False):
            expected = lower_bound(case.chain, case.machine, case.caps)
        assert (found is None) == (expected is None), f"seed {seed}"
        if found is not None and expected is not None:
            assert found.step_s == pytest.approx(expected.step_s, rel=1e-6), f"seed {seed}"
    assert 10 < sum(asked) < NUM_CHAINS - 100
