"""The rule that chooses calibration cells looks at configurations alone."""

from dataclasses import dataclass

import pytest

from twinstream.hardware_profiles.calibration.cells import default_cells
from twinstream.hardware_profiles.errors import CalibrationError


@dataclass(frozen=True)
class Row:
    model: str
    seq_len: int
    host_mem_gib: float
    dev_mem_gib: float
    status: str = "ok"


def grid(model, lengths, caps=((32, 16), (64, 16), (32, 48), (64, 48))):
    return [Row(model, length, host, device) for length in lengths for host, device in caps]


LENGTHS = [512 * 2**i for i in range(12)]


def test_one_model_gives_smallest_and_largest_caps_at_seven_lengths():
    cells = default_cells(grid("8B", LENGTHS))
    assert len(cells) == 14
    assert {c.seq_len for c in cells} >= {LENGTHS[0], LENGTHS[-1]}
    assert {(c.host_mem_gib, c.dev_mem_gib) for c in cells} == {(32, 16), (64, 48)}


def test_models_share_the_pairs_and_the_one_with_more_rows_comes_first():
    rows = grid("1B", LENGTHS) + grid("8B", LENGTHS, caps=[(16 * i, i) for i in range(8, 16)])
    cells = default_cells(rows)
    assert len([c for c in cells if c.model == "8B"]) == 8
    assert len([c for c in cells if c.model == "1B"]) == 6
    assert sorted({c.seq_len for c in cells if c.model == "1B"}) == [
        LENGTHS[0], LENGTHS[6], LENGTHS[-1]
    ]  # fmt: skip


def test_a_single_pair_is_at_the_middle_length():
    rows = [row for i in range(7) for row in grid(f"m{i}", LENGTHS[:3])]
    cells = default_cells(rows)
    assert {c.seq_len for c in cells} == {LENGTHS[1]}
    assert len(cells) == 14


def test_failed_rows_do_not_count():
    rows = [*grid("8B", LENGTHS[:1]), Row("8B", 512, 8, 8, "failed")]
    assert {(c.host_mem_gib, c.dev_mem_gib) for c in default_cells(rows)} == {(32, 16), (64, 48)}


def test_few_lengths_are_all_taken_once():
    assert len(default_cells(grid("8B", LENGTHS[:2]))) == 4
    assert len(default_cells([Row("8B", 512, 8, 8)])) == 1


def test_fewer_cells_may_be_asked_for():
    assert len(default_cells(grid("8B", LENGTHS), most=8)) == 8


def test_a_table_without_success_is_refused():
    with pytest.raises(CalibrationError, match="no successful row"):
        default_cells([Row("8B", 512, 8, 8, "failed")])
