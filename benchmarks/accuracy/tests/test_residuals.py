"""The table of residuals joins steps with what was said of them."""

import csv
from pathlib import Path

from benchmarks.accuracy.published.residuals import residuals_csv
from twinstream.measures.published_steps import COLUMNS, _table

STEPS = """row,gpu,num_gpus,cluster,model,seq_len,global_batch,layout,step_time_s,series,calibrates
a,H100,16,h100_dgx,8b,4096,64,tp=2 dp=8 zero=3,1.0,mine,false
b,H100,16,h100_dgx,8b,4096,64,dp=16,1.0,mine,true
"""
ROWS = """series,row,split,error
mine,a,scored,0.12345
mine,b,calibration,0.5
"""


def test_only_steps_that_nothing_was_fitted_to_are_written(tmp_path: Path) -> None:
    steps, rows = tmp_path / "steps.csv", tmp_path / "rows.csv"
    steps.write_text(STEPS, encoding="utf-8")
    rows.write_text(ROWS, encoding="utf-8")
    source, *lines = residuals_csv(steps, rows, "a page").splitlines()
    assert source == "# a page"
    (one,) = csv.DictReader(lines)
    assert list(one) == list(COLUMNS)
    assert (one["cluster"], one["axes"], one["zero3"]) == ("h100_dgx", "dp tp", "True")
    assert (one["parameters"], one["gpus"], one["error"]) == ("8030261248", "16", "0.1235")


def test_the_shipped_table_is_what_the_page_says() -> None:
    source, steps = _table()
    assert source.startswith("docs/benchmarks/clusters.md, ")
    mosaic = [abs(step.error) for step in steps if step.series == "mosaicml H100 80GB bf16_amp"]
    assert len(mosaic) == 28 and round(sum(mosaic) / 28, 3) == 0.039
