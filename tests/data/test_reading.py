"""Files and their blocks: every line, byte and token once, wherever blocks are cut."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstream.data.data_error import DataError
from twinstream.data.options import Source
from twinstream.data.reading import ranges
from twinstream.data.reading.bins import read_bin
from twinstream.data.reading.blocks import lay_out
from twinstream.data.reading.files import content_hashes, find_files
from twinstream.data.reading.ranges import text_in
from twinstream.data.reading.rows import rows_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def parts_of(path: Path, block_bytes: int):
    files = find_files(Source(path)).files
    blocks = lay_out(files, content_hashes(files), block_bytes)
    return [part for block in blocks for part in block.parts]


def llmc(magic: int, version: int, tokens, dtype: str, claimed: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if claimed is None else claimed
    return header.tobytes() + np.array(tokens, dtype).tobytes()


@given(st.lists(st.text("aé\r \t", max_size=12), max_size=20), st.integers(1, 60), st.booleans())
def test_each_line_is_read_once_and_is_where_it_says(folder, texts, block_bytes, ends_open):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    lines = [line for pair in zip(lines, [""] * len(lines), strict=True) for line in pair]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + ("" if ends_open else "\n"), newline="")
    if not path.read_bytes():
        return
    rows = [row for part in parts_of(path, block_bytes) for row in rows_of(part)]
    assert [row.fields["text"] for row in rows] == texts
    assert [row.where() for row in rows] == [f"{path}:{2 * i + 1}" for i in range(len(texts))]


@given(st.text("ab é\n", min_size=1, max_size=300), st.integers(1, 80), st.integers(8, 20))
def test_the_pieces_of_a_text_are_all_of_it(folder, text, block_bytes, look_bytes):
    path = folder / "text.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_LOOK_BYTES", look_bytes)
        pieces = [text_in(p.path, p.first, p.end) for p in parts_of(path, block_bytes)]
    assert "".join(piece for piece, _ in pieces) == text


def test_a_text_is_cut_at_line_ends(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one line\n" * 1000)
    pieces = [text_in(p.path, p.first, p.end)[0] for p in parts_of(path, 700)]
    assert len(pieces) > 10
    assert all(piece.endswith("\n") for piece in pieces)


def test_a_mark_before_the_text_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abc"}')
    text, rows = parts_of(tmp_path, 100)
    assert text_in(text.path, text.first, text.end) == ("abc", 3)
    assert [row.fields for row in rows_of(rows)] == [{"text": "abc"}]


def test_small_files_share_a_block_and_kinds_do_not(tmp_path):
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text("x" * 30)
    (tmp_path / "9.jsonl").write_text("{}")
    files = find_files(Source(tmp_path)).files
    blocks = lay_out(files, content_hashes(files), 100)
    assert [[part.path.name for part in block.parts] for block in blocks] == [
        ["0.txt", "1.txt", "2.txt"],
        ["3.txt", "4.txt", "5.txt"],
        ["6.txt", "7.txt", "8.txt"],
        ["9.jsonl"],
        ["9.txt"],
    ]


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_and_other_files(tmp_path):
    for name in ("b/z.txt", "b.txt", "a/y.jsonl", ".git/x.txt", "a/.hidden.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()
    found = find_files(Source(tmp_path))
    names = [file.path.relative_to(tmp_path).as_posix() for file in found.files]
    assert names == ["a/y.jsonl", "b/z.txt", "b.txt"]
    assert found.left_out == f"{tmp_path}: 1 file(s) of other kinds are left out: .md (1)"


@pytest.mark.parametrize("block_bytes", [8, 100_000])
@pytest.mark.parametrize(
    "write",
    [
        lambda tokens: np.array(tokens, "<u2").tobytes(),
        lambda tokens: llmc(20240520, 1, tokens, "<u2"),
        lambda tokens: llmc(20240801, 7, tokens, "<u4"),
    ],
    ids=["nanoGPT", "llm.c-2", "llm.c-4"],
)
def test_tokens_of_a_bin_are_read_once(tmp_path, write, block_bytes):
    tokens = [*range(100), 65535]
    path = tmp_path / "tokens.bin"
    path.write_bytes(write(tokens))
    runs = [read_bin(part.path, part.first, part.end) for part in parts_of(path, block_bytes)]
    assert np.concatenate(runs).tolist() == tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", r"3 bytes, an odd number"),
        (llmc(20240522, 1, [1], "<u2"), r"begins with 20240522, which is no magic number"),
        (llmc(20240520, 2, [1], "<u2"), r"version 2.*reads version 1"),
        (llmc(20240801, 7, [1, 2], "<u4", claimed=9), r"1032 bytes.*9 tokens, which are 1060"),
        (llmc(20240801, 7, [2**31], "<u4"), r"token 0: id 2147483648 is no token's"),
    ],
)
def test_a_damaged_bin_is_refused_with_its_numbers(tmp_path, content, message):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}.*{message}"):
        for part in parts_of(path, 1000):
            read_bin(part.path, part.first, part.end)


def test_the_hash_is_of_the_content_alone(tmp_path):
    for name, content in (("a.txt", "same"), ("b.txt", "same"), ("c.txt", "sane")):
        (tmp_path / name).write_text(content)
    a, b, c = content_hashes(find_files(Source(tmp_path)).files)
    assert a == b != c


def test_rows_of_parquet_are_read_once_by_slices_of_row_groups(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    texts = [f"row {index} " * 20 for index in range(100)]
    table = pyarrow.table({"id": list(range(100)), "text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=30)
    parts = parts_of(path, 300)
    assert len(parts) > 8
    rows = [row for part in parts for row in rows_of(part)]
    assert [row.fields for row in rows] == [{"text": text} for text in texts]
    assert [row.where() for row in rows] == [f"{path}, row {index + 1}" for index in range(100)]
