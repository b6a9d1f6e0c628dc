"""Tables of commas, and rows that have tokens already."""

import csv

import pytest

from tests.data.samples import data_of, documents, lines_of
from tests.data.test_shapes import read
from twinstream.data.data_error import DataError
from twinstream.data.reading.csvs import csv_rows_within


def test_tables_of_commas_are_read_as_the_library_reads_them(tmp_path):
    """Cells with commas, quotes and line ends; blocks end where rows do."""
    rows = [
        {"prompt": f'{n}, "so" he said:\n', "completion": f"line 1,\r\n\nline {n} é", "id": str(n)}
        for n in range(40)
    ]
    for lead, ending in (("", "\r\n"), ("\ufeff", "\n")):
        with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
            file.write(lead)
            writer = csv.DictWriter(file, ["prompt", "completion", "id"], lineterminator=ending)
            writer.writeheader()
            writer.writerows(rows)
            file.write(ending)
        _, texts, _ = read(tmp_path, rows, name="rows.csv")
        _, of_lines, _ = read(tmp_path, rows)
        assert sorted(texts) == sorted(of_lines) and len(texts) == 40


def test_a_large_table_is_divided_where_its_rows_begin(tmp_path):
    from twinstream.data.options import Source
    from twinstream.data.reading.blocks import split_into_blocks
    from twinstream.data.reading.files import content_hashes, find_files
    from twinstream.data.reading.rows import rows_of

    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text", "n"], *([f"a\nb,{n}" * 5, n] for n in range(200))])
    files = find_files(Source(path)).files
    blocks = split_into_blocks(files, content_hashes(files), 600)
    assert len(blocks) > 8
    rows = [row for block in blocks for part in block.parts for row in rows_of(part)]
    with path.open(newline="") as file:
        assert [row.fields for row in rows] == list(csv.DictReader(file))
    assert [row.where() for row in rows] == [f"{path}, row {n + 1}" for n in range(200)]


def test_the_longest_cell_of_a_process_stays_what_it_was(tmp_path):
    """Other tables of this process are read with Python's own limit."""
    limit = csv.field_size_limit()
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "a" * (limit + 1) + "\nb\n")
    for _, row in csv_rows_within(path, 0, path.stat().st_size):
        assert row["text"] and csv.field_size_limit() == limit
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("text\n", "has no rows"),
        ("text,text\na,b\n", "names a column 'text' twice"),
        ("a;text\n1;b\n", "has no commas between its columns"),
        ("text,id\na\n", "byte 8: a row of 1 cells, and the first line names 2"),
        ('text,id\n"a,1\n', "byte 8: no CSV from here on"),
        ('text,id\n"a"b,1\n', "byte 8: no CSV from here on"),
        ("say\na\n", "none of the fields.*it has say: rename"),
        ("text\n\xe9\n", "is not UTF-8 text"),
        ("text\na\x00b\n", None),
    ],
)
def test_a_table_that_cannot_be_read_is_one_message(tmp_path, content, why):
    (tmp_path / "rows.csv").write_bytes(content.encode("latin-1"))
    if why is None:
        assert read(tmp_path, [], name="rows.csv")[1]
        return
    with pytest.raises(DataError, match=why):
        read(tmp_path, [], name="rows.csv")


@pytest.mark.parametrize(
    ("more", "learned"),
    [
        ({}, [6, 7, 8, 9]),
        ({"labels": [-100, -100, 7, 8, 9]}, [7, 8, 9]),
        ({"labels": [-100, 6, -100, 8, -100], "attention_mask": [1, 1, 1, 1, 0]}, [6, 8]),
        ({"completion_mask": [0, 0, 0, 1, 1]}, [8, 9]),
    ],
)
def test_token_ids_are_learned_where_labels_say(tmp_path, more, learned):
    """As transformers' models take them: a label is at the place of its own id."""
    path = tmp_path / "rows.jsonl"
    path.write_text(lines_of([{"input_ids": [5, 6, 7, 8, 9], **more}]))
    ((ids, labels),) = documents(
        next(data_of(path).chunks(chunk_tokens=64, most_documents=4, seed=0))
    )
    kept = sum(more.get("attention_mask", [1] * 5))
    assert ids == [5, 6, 7, 8, 9][:kept]
    assert [one for one in labels if one >= 0] == learned


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"labels": [6, 7, 8, 9, -100]}, "number 1 of `labels` is 6, and of `input_ids` 5"),
        ({"labels": [5]}, "`labels` has 1 numbers, and `input_ids` has 5"),
        ({"labels": "all"}, "`labels` needs to be a list of whole numbers, and is text"),
        ({"input_ids": [1.5]}, "`input_ids` needs to be a list of whole numbers"),
        ({"input_ids": [-1, 2]}, "`input_ids` has -1 to 2"),
        ({"input_ids": [1, 2**70]}, "that is no id"),
        ({"input_ids": [1, 300]}, "token id 300 is outside the model's vocabulary"),
    ],
)
def test_token_ids_that_cannot_be_used_are_named(tmp_path, more, why):
    (tmp_path / "rows.jsonl").write_text(lines_of([{"input_ids": [5, 6, 7, 8, 9], **more}]))
    with pytest.raises(DataError, match=why):
        data_of(tmp_path / "rows.jsonl", vocab_size=256)
