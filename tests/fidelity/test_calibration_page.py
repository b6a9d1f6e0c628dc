"""What docs/calibration.md shows is what the readers take."""

import re
from pathlib import Path

from twinstream.fidelity.rows import listed_rows
from twinstream.hardware_profiles.measured_table import NEEDED, MeasuredRow, read_measured

PAGE = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text(encoding="utf-8")
TABLE, CELLS = re.findall(r"```csv\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_is_a_table_of_measured_speeds(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TABLE, encoding="utf-8")
    fast, slow, failed = read_measured(path)
    assert (fast.machine, fast.model, fast.seq_len, fast.dev_mem_gib) == ("H100", "8B", 8192, 60)
    assert (slow.tokens_per_s, slow.step_time_s) == (9781.02637, 56.952942)
    assert (failed.status, failed.status_detail, failed.tokens_per_s) == ("failed", "oom", None)
    assert not any(row.columns for row in (fast, slow, failed))  # each column is a known one


def test_the_list_of_cells_chooses_from_the_example(tmp_path):
    (tmp_path / "table.csv").write_text(TABLE, encoding="utf-8")
    (tmp_path / "cells.csv").write_text(CELLS, encoding="utf-8")
    rows = read_measured(tmp_path / "table.csv")
    assert listed_rows(rows, tmp_path / "cells.csv") == rows[:2]


def test_the_page_has_every_column_and_says_which_are_needed():
    documented = dict(re.findall(r"^\| `(\w+)` \| (yes|no) \|", PAGE, re.MULTILINE))
    assert set(documented) == set(MeasuredRow.model_fields) - {"line", "columns"}
    assert {name for name, needed in documented.items() if needed == "yes"} == set(NEEDED)
