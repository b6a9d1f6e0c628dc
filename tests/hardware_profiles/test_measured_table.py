"""Tables of measured speeds are read as documented, and faults are told with their place."""

from pathlib import Path

import pytest

from twinstream.hardware_profiles.measured_table import MeasuredTableError, read_measured

FEW = Path(__file__).parents[1] / "data" / "measured_few.csv"
HEADER = "machine,model,seq_len,host_mem_gib,dev_mem_gib,tokens_per_s"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rows_are_read_with_their_lines_and_further_columns(tmp_path):
    path = written(tmp_path, "# from a run", "", f"note,{HEADER}", "cold,H100,8B,512,60,24.5,100.5")
    (row,) = read_measured(path)
    assert (row.line, row.machine, row.preset, row.seq_len) == (4, "H100", "8b", 512)
    assert (row.host_mem_gib, row.dev_mem_gib, row.tokens_per_s) == (60.0, 24.5, 100.5)
    assert row.columns == {"note": "cold"}
    assert (row.status, row.rounds_per_step, row.rounds_rule) == ("ok", None, "")


def test_a_row_without_a_speed_failed(tmp_path):
    (row,) = read_measured(written(tmp_path, HEADER, "H100,8B,512,60,24,"))
    assert (row.status, row.tokens_per_s) == ("failed", None)


def test_a_row_that_ran_out_of_memory_failed_for_that_reason(tmp_path):
    lines = ("H100,8B,512,60,24,,OOM,", "H100,8B,512,60,24,,oom,host", "H100,8B,512,60,24,9,Ok,")
    rows = read_measured(written(tmp_path, HEADER + ",status,status_detail", *lines))
    assert [row.status for row in rows] == ["failed", "failed", "ok"]
    assert [row.status_detail for row in rows] == ["oom", "host", ""]


def test_recorded_cells_are_read():
    rows = read_measured(FEW)
    assert [row.status for row in rows].count("failed") == 3
    assert {row.rounds_rule for row in rows if row.status == "ok"} == {"v1"}
    assert all(row.step_time_s and row.rounds_per_step for row in rows if row.status == "ok")


def test_spreadsheets_mark_the_encoding_and_end_lines_their_own_way(tmp_path):
    path = tmp_path / "table.csv"
    header = HEADER.replace(",", " , ").title()
    path.write_bytes(f"{header}\r\n\r\n H100,8B,512,60, 24 ,10,\r\n".encode("utf-8-sig"))
    (row,) = read_measured(path)
    assert (row.machine, row.model, row.dev_mem_gib, row.tokens_per_s) == ("H100", "8B", 24.0, 10.0)


def test_further_columns_may_be_called_anything(tmp_path):
    path = written(tmp_path, HEADER + ",line,columns", "H100,8B,512,60,24,10,7,all")
    (row,) = read_measured(path)
    assert (row.line, row.columns) == (2, {"line": "7", "columns": "all"})


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "is empty"),
        ([HEADER], "no rows"),
        (["machine,model"], "no column seq_len, host_mem_gib, dev_mem_gib, tokens_per_s"),
        ([HEADER, "H100,8B,512,60,24,fast"], "line 2, tokens_per_s"),
        ([HEADER, "H100,8B,-512,60,24,10"], "line 2, seq_len"),
        ([HEADER, "H100,8B,512.5,60,24,10"], "line 2, seq_len"),
        ([HEADER, "H100,8B,512,nan,24,10"], "line 2, host_mem_gib"),
        ([HEADER, "H100,8B,512,60,24,inf"], "line 2, tokens_per_s"),
        ([HEADER, "H100,8B,512,60"], "line 2, dev_mem_gib: there is no value"),
        ([HEADER + ",policy", "H100,8B,512,60,24,9"], "line 2 has 6 values for 7 columns"),
        ([HEADER, "H100,8B,512,60,24,9,000"], "line 2 has 7 values for 6 columns"),
        ([HEADER + ",model", "H100,8B,512,60,24,10,8B"], "the column model twice"),
        ([HEADER + ",status", "H100,8B,512,60,24,,ok"], "line 2, tokens_per_s"),
        ([HEADER + ",status", "H100,8B,512,60,24,,lost"], "line 2, status"),
        ([HEADER, "H100," + "B" * 140_000], "line 2: field larger than"),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(lines, told, tmp_path):
    with pytest.raises(MeasuredTableError) as refused:
        read_measured(written(tmp_path, *lines))
    assert told in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(MeasuredTableError, match="No such file"):
        read_measured(tmp_path / "none.csv")


def test_bytes_that_are_no_text_are_told(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeasuredTableError, match="UTF-8"):
        read_measured(path)
