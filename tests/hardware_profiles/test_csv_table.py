"""Lines of measured tables, as a spreadsheet writes them."""

import csv
from pathlib import Path

import pytest

from twinstream.hardware_profiles.csv_table import csv_lines, table_text
from twinstream.schedule.errors import TwinstreamError


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a,b\n1,2\n", [(1, ["a", "b"]), (2, ["1", "2"])]),
        ("# told\n\na,b\n , \n,,\n1,2\n", [(3, ["a", "b"]), (6, ["1", "2"])]),
        ('a,b\r\n"x, ""y""",2\r\n', [(1, ["a", "b"]), (2, ['x, "y"', "2"])]),
        ('a\n"two\nlines"\n3\n', [(1, ["a"]), (3, ["two\nlines"]), (4, ["3"])]),
        ("", []),
    ],
)  # fmt: skip
def test_lines_have_their_numbers_and_blank_ones_and_comments_are_none(text, lines):
    assert csv_lines(text, "t.csv", TwinstreamError) == lines


def test_what_is_no_csv_is_told_with_its_line():
    long = "x" * (csv.field_size_limit() + 1)
    with pytest.raises(TwinstreamError, match=r"^t.csv, line 2: field larger than field limit"):
        csv_lines(f"a,b\n{long},1\n", "t.csv", TwinstreamError)


def test_what_cannot_be_read_is_told_with_the_reason(tmp_path: Path):
    (tmp_path / "latin.csv").write_bytes(b"a,\xe9\n")
    with pytest.raises(TwinstreamError, match=r"cannot read .*latin.csv: it is not text in UTF-8"):
        table_text(tmp_path / "latin.csv", TwinstreamError)
    with pytest.raises(TwinstreamError, match=r"cannot read .*none.csv: No such file"):
        table_text(tmp_path / "none.csv", TwinstreamError)
