"""Files and their blocks: every line, byte and token once, wherever blocks are cut."""

import json
import struct
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstream.data.data_error import DataError
from twinstream.data.options import Source
from twinstream.data.reading import arrays, ranges
from twinstream.data.reading.bins import read_bin
from twinstream.data.reading.blocks import split_into_blocks
from twinstream.data.reading.files import content_hashes, find_files
from twinstream.data.reading.ranges import text_in
from twinstream.data.reading.rows import rows_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def parts_of(path: Path, block_bytes: int):
    files = find_files(Source(path)).files
    blocks = split_into_blocks(files, content_hashes(files), block_bytes)
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


@given(st.lists(st.text('aé]}\\"[ ', max_size=12), max_size=20), st.integers(1, 200))
def test_each_row_of_an_array_is_read_once_and_is_where_it_says(folder, texts, block_bytes):
    path = folder / "rows.json"
    rows = [{"text": text, "more": [{"text": text}]} for text in texts]
    path.write_text("\ufeff \n" + json.dumps(rows, ensure_ascii=False, indent=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_READ_BYTES", 7)
        parts = parts_of(path, block_bytes)
        found = [row for part in parts for row in rows_of(part)]
    assert [row.fields for row in found] == rows
    assert [row.where() for row in found] == [f"{path}, row {i + 1}" for i in range(len(rows))]
    if parts:
        assert len(list(rows_of(parts[0].head(1, 1)))) == 1


def test_blocks_within_a_long_line_read_no_further_than_themselves(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a" * 10_000}) + '\n{"text": "b"}\n')
    first, *inside, last = parts_of(path, 500)
    assert [len(row.fields["text"]) for row in rows_of(first)] == [10_000]
    assert [row.fields["text"] for row in rows_of(last)] == ["b"]
    read = []
    with path.open("rb") as file:
        for part in inside:
            ranges._line_start(file, part.first, part.end)
            read.append(file.tell() - part.first)
    assert 0 < max(read) <= 500


@given(st.text("ab é\n", min_size=1, max_size=300), st.integers(1, 80), st.integers(8, 20))
def test_the_pieces_of_a_text_are_all_of_it(folder, text, block_bytes, look_bytes):
    path = folder / "text.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_LOOK_BYTES", look_bytes)
        pieces = [text_in(p.path, p.first, p.end) for p in parts_of(path, block_bytes)]
    assert "".join(piece for piece, _ in pieces) == text


@pytest.mark.parametrize("char", ["a", "é", "語", "🙂"])
def test_a_text_without_spaces_is_cut_between_characters(tmp_path, monkeypatch, char):
    monkeypatch.setattr(ranges, "_LOOK_BYTES", 8)
    path, size = tmp_path / "text.txt", len(char.encode())
    path.write_text(char * 40)
    for cut in range(1, 20 * size):
        behind = ceil(cut / size)  # the first whole number of characters that reaches the cut
        assert text_in(path, 0, cut) == (char * behind, 0)
        assert text_in(path, cut, 40 * size) == (char * (40 - behind), behind * size)


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
    blocks = split_into_blocks(files, content_hashes(files), 100)
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
        lambda tokens: np.array(tokens, "<u4").tobytes(),
        lambda tokens: np.array(tokens, "<i8").tobytes(),
    ],
    ids=["nanoGPT", "llm.c-2", "llm.c-4", "uint32", "int64"],
)
def test_tokens_of_a_bin_are_read_once(tmp_path, write, block_bytes):
    tokens = [*range(100), 65535]
    path = tmp_path / "tokens.bin"
    path.write_bytes(write(tokens))
    runs = [read_bin(part.path, part.first, part.end) for part in parts_of(path, block_bytes)]
    assert np.concatenate(runs).tolist() == tokens


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        ([128_000, 70_000, *range(300)], "<u4"),  # of a large vocabulary
        ([1, 0] * 50, "<u2"),
        ([0] * 100, "<u2"),
        ([300, 16] * 50, "<u2"),
        ([5, 0, 7], "<u2"),  # too few to tell
    ],
)
def test_the_size_of_tokens_is_told_by_their_upper_halves(tmp_path, ids, dtype):
    path = tmp_path / "tokens.bin"
    np.array(ids, dtype).tofile(path)
    expected = ids if ids[:4] != [1, 0] * 2 else [1] * 50  # as uint32 they are the same bytes
    assert read_bin(path, 0, 1000).tolist() == expected


def megatron_index(code: int, lengths, version: int = 1) -> bytes:
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, len(lengths), len(lengths) + 1)
    return header + np.array(lengths, "<i4").tobytes()


@pytest.mark.parametrize(("code", "dtype"), [(4, "<i4"), (8, "<u2"), (5, "<i8"), (1, "<u1")])
def test_the_index_of_megatron_says_the_size_of_tokens(tmp_path, code, dtype):
    (tmp_path / "a.idx").write_bytes(megatron_index(code, [30, 0, 70]))
    np.zeros(100, dtype).tofile(tmp_path / "a.bin")  # that tell nothing themselves
    runs = [read_bin(part.path, part.first, part.end) for part in parts_of(tmp_path, 40)]
    assert len(runs) > 1
    assert np.concatenate(runs).tolist() == [0] * 100
    assert find_files(Source(tmp_path)).left_out is None


def test_a_negative_id_is_no_token(tmp_path):
    (tmp_path / "a.idx").write_bytes(megatron_index(4, [2]))
    np.array([3, -7], "<i4").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a.bin, token 1: id -7 is no token's"):
        read_bin(tmp_path / "a.bin", 0, 2)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"what", r"a.idx is no index of Megatron-LM"),
        (megatron_index(7, [100]), r"version 1 with dtype 7"),
        (megatron_index(4, [100], version=2), r"version 2 with dtype 4"),
        (megatron_index(4, [99]), r"a.bin has 400 bytes, and a.idx says 99 tokens.* 396 bytes"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, index, message):
    (tmp_path / "a.idx").write_bytes(index)
    np.zeros(100, "<i4").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=message):
        read_bin(tmp_path / "a.bin", 0, 100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.arange(40, dtype="<u4").tobytes()[:-2], r"158 bytes, no multiple.*of 4 bytes"),
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
