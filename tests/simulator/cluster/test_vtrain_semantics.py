"""With vTrain's times for every op, a step takes what vTrain's published table says."""

import pytest

from tests.simulator.cluster.vtrain_step import VtrainStep
from tests.simulator.cluster.vtrain_tables import Row, VtrainTimes, read_rows
from twinstream.simulator.replay import cold_step_ns

WITHIN = 1e-6
ROWS, TIMES = read_rows(), VtrainTimes()
LAYOUTS = sorted({(row.pp, row.tp) for row in ROWS})


def step_ns(row: Row, forward_share: float = 1 / 3, *, layer_by_layer: bool = False) -> int:
    schedule, durations = VtrainStep(row, TIMES, forward_share, layer_by_layer).build()
    return cold_step_ns(schedule, durations)


@pytest.mark.parametrize(("pp", "tp"), LAYOUTS)
def test_every_row_takes_what_the_table_says(pp, tp):
    rows = [row for row in ROWS if (row.pp, row.tp) == (pp, tp)]
    errors = {row: step_ns(row) / 1e6 / row.iteration_ms - 1 for row in rows}
    assert not {row: error for row, error in errors.items() if abs(error) > WITHIN}


def test_the_rows_have_every_layout_of_a_node():
    found = {pp: [tp for stages, tp in LAYOUTS if stages == pp] for pp, _ in LAYOUTS}
    assert found == {1: [1, 2, 4, 8], 2: [1, 2, 4], 4: [1, 2]}
    assert {row.dp for row in ROWS} == {1, 2, 4, 8}
    assert len(set(ROWS)) == 649


@pytest.mark.parametrize(("pp", "tp"), LAYOUTS)
def test_layer_by_layer_it_takes_the_same_nanoseconds(pp, tp):
    row = min((r for r in ROWS if (r.pp, r.tp) == (pp, tp)), key=lambda r: r.iteration_ms)
    assert step_ns(row, layer_by_layer=True) == step_ns(row)


@pytest.mark.parametrize("forward_share", [0.0, 0.1, 0.7, 1.0])
def test_how_a_layer_splits_into_forward_and_backward_does_not_matter(forward_share):
    rows = [row for row in ROWS if row.pp > 1][::20]
    assert [step_ns(row, forward_share) for row in rows] == [step_ns(row) for row in rows]
