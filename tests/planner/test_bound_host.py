"""Rows for host memory that are left out at first change no bound."""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.helpers.small_chains import small_case
from twinstream.planner.bound import host_rows as bound_host
from twinstream.planner.bound.host_rows import Cap, HostRows
from twinstream.planner.bound.interval_columns import Interval
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.bound.program import Program

NUM_CHAINS = 600


@pytest.mark.parametrize(("plenty", "least_kept", "least_not"), [(1.2, 100, 1), (1e9, 200, 40)])
def test_bounds_are_those_with_the_rows_of_the_host_from_the_start(
    plenty, least_kept, least_not, monkeypatch
):
    """Also where they are left out at first though there is little room."""
    monkeypatch.setattr(bound_host, "_PLENTY", plenty)
    asked: Counter[str] = Counter()
    left_out, kept = HostRows.may_be_left_out, HostRows.are_kept

    def counted(rows: HostRows, cap: Cap | None) -> bool:
        asked["left out"] += (found := left_out(rows, cap))
        return found

    def counted_kept(rows: HostRows, *args: object) -> bool:
        asked[f"kept: {(found := kept(rows, *args))}"] += 1  # type: ignore[arg-type]
        return found

    for seed in range(NUM_CHAINS):
        case = small_case(seed)
        with (
            patch.object(HostRows, "may_be_left_out", counted),
            patch.object(HostRows, "are_kept", counted_kept),
        ):
            found = lower_bound(case.chain, case.machine, case.caps)
        with patch.object(HostRows, "may_be_left_out", lambda rows, cap: False):
            expected = lower_bound(case.chain, case.machine, case.caps)
        assert (found is None) == (expected is None), f"seed {seed}"
        if found is not None and expected is not None:
            assert found.step_s == pytest.approx(expected.step_s, rel=1e-6), f"seed {seed}"
    assert asked["left out"] < NUM_CHAINS
    assert asked["kept: True"] >= least_kept and asked["kept: False"] >= least_not, asked


def test_what_is_in_flight_is_not_on_the_host_and_what_is_used_is_on_the_device():
    """5 GiB on the host over two segments, of which 1 is loaded early at the second."""
    gaps: Any = SimpleNamespace(
        tied=False, host_at=[(0, 2, [(0, 5.0)])], kept_at=[(0, 1, [(0, 2.0)])],
        loaded_at=[(0, 2, [(0, 5.0)])],
    )  # fmt: skip
    intervals = [Interval(0, 0, 0, ahead, 1) for ahead in (1, 2)]
    rows = HostRows(Program(), gaps, intervals, used_gib=[1.0, 0.0], all_gib=100.0)
    assert rows.may_be_left_out(Cap(gib=5)) and not rows.may_be_left_out(Cap(gib=4))
    values = np.asarray([1.0, 0.0, 1.0])
    assert rows.are_kept(values, None, Cap(gib=5))
    assert not rows.are_kept(values, None, Cap(gib=5 - 1 / 1024))
    assert rows.are_kept(np.asarray([0.8, 0.0, 0.0]), None, Cap(gib=4))
    assert rows.are_kept(np.asarray([1.0, 1.0, 1.0]), None, Cap(gib=4))
    assert rows.are_kept(values, Cap(gib=3), Cap(gib=5))
    assert not rows.are_kept(values, Cap(gib=3 - 1 / 1024), Cap(gib=5))
