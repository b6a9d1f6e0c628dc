"""What cannot be used is refused in one message: what, where, and what to do."""

import sys

import pytest

from tests.data.samples import CHAT, HERE, data_of, lines_of, tokenizer_folder
from twinstream.data.data_error import DataError
from twinstream.data.options import DataOptions, Source
from twinstream.data.training_data import TrainingData
from twinstream.schedule.errors import ArgumentError


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', r"a.jsonl:3 is no JSON object \(Expecting"),
        ("a.jsonl", b'["a"]\n', r"a.jsonl:1 .*it is a list.*one array.*the ending .json"),
        ("a.json", b'[\n{"text": "a"}, "b"]\n', r"a.json, byte 17: .*each row needs to be one"),
        ("a.json", b'[{"text": "a"}, ', r"a.json, byte 16: .*ends before"),
        ("a.json", b'[{"text": "a"}, {"text": ', r"a.json, byte 16: .*Expecting value"),
        ("a.json", b'[{"text": "\xff"}]', r"a.json is not UTF-8 text"),
        ("a.json", b"[]", r"a.json has no rows"),
        ("a.jsonl", b'"text"\n', r"a.jsonl:1 .*it is a str.*each line needs to be one object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a.jsonl is not UTF-8 text: byte 24"),
        ("a.jsonl", b"\n \n", r"each document is empty"),
        ("a.jsonl", b'{"text": ""}\n' * 3, r"each document is empty"),
        ("a.jsonl", b'{"text": "a"}\n' * 3, r"none of 3 sampled documents has a token to learn"),
        ("a.txt", b"caf\xe9 au lait", r"a.txt is not UTF-8 text: byte 3 is 0xe9; convert it"),
        ("a.txt", b"", r"a.txt is empty \(0 bytes\)"),
        ("a.xml", b"text", r"a.xml is of an unknown kind, '.xml': twinstream reads .txt, .jsonl"),
        ("a.parquet", b"PAR1 not really", r"a.parquet is no parquet file, or damaged"),
        ("a.bin", b"\x01\x00\x02", r"a.bin has 3 bytes, an odd number"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        data_of(tmp_path / name)


def test_missing_files_and_empty_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none.txt: No such file"):
        data_of(tmp_path / "none.txt")
    (tmp_path / "x.xml").touch()
    with pytest.raises(DataError, match=r"has no file to train on, but others: .xml \(1\)"):
        data_of(tmp_path)
    with pytest.raises(DataError, match="there is no file to train on"):
        TrainingData.open([], None, longest=64, options=HERE)


@pytest.mark.parametrize(
    "options", [{"loss_on": "prompts"}, {"long_documents": "drop"}, {"workers": -1}]
)
def test_an_option_that_is_none_is_refused(options):
    with pytest.raises(ArgumentError, match=f"{next(iter(options))} needs"):
        DataOptions(**options)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(tmp_path, weight):
    with pytest.raises(DataError, match=r"weight of .* is .*number of times that an epoch"):
        Source(tmp_path, weight)


def test_columns_of_parquet_are_shown_where_none_is_known(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet has no column of `text`.*it has body, id"):
        data_of(tmp_path / "a.parquet")
    chats = pyarrow.table({"messages": [CHAT] * 3})
    pyarrow.parquet.write_table(chats, tmp_path / "a.parquet")
    folder = tokenizer_folder(tmp_path / "tokenizer")
    assert len(data_of(tmp_path / "a.parquet", folder, longest=512).lengths()) == 3
    rows = pyarrow.table({"text": ["fine", None]})
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 2: .*it has text \(null\)"):
        data_of(tmp_path / "a.parquet")


def test_a_tokenizer_that_is_none_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"has no tokenizer\.json\. Make one"):
        data_of(tmp_path / "a.txt", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is no tokenizer.json: "):
        data_of(tmp_path / "a.txt", tmp_path)


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("jinja2", "a.jsonl"), ("tokenizers", "a.txt")]
)
def test_a_missing_package_is_named_with_how_to_get_it(tmp_path, monkeypatch, package, name):
    folder = tokenizer_folder(tmp_path / "tokenizer")
    (tmp_path / name).write_text(lines_of([{"messages": CHAT}]))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        DataError, match=f"`{package}`, which is not installed: pip install {package}"
    ):
        data_of(tmp_path / name, folder)


def test_bytes_that_never_stop_are_warned_of_in_rows_and_not_in_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}')
    (tmp_path / "b.txt").write_text("abc")
    (warning,) = data_of(tmp_path / "a.jsonl").warnings
    assert "in 1 of 1 sampled documents no end token is learned" in warning
    assert data_of(tmp_path / "b.txt").warnings == ()
