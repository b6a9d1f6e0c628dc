"""The cache: it gives back what was put in, and nothing that is damaged."""

import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.samples import CHAT, data_of, lines_of, tokenizer_folder
from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokeniser import BlockTokeniser
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.encoding.cache import TokenCache
from twinstream.data.reading import files


def same(a, b) -> bool:
    names = ("ids", "learned", "ends", "rows")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@st.composite
def tokens(draw):
    flags = draw(st.lists(st.booleans(), max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(flags)), max_size=5)))
    ids = np.arange(len(flags), dtype=np.int32) * 70_001
    rows = np.array(
        draw(st.lists(st.integers(0, 9), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    )
    return BlockTokens(ids, np.array(flags, np.bool_), np.array([*cuts, len(flags)]), rows)


@given(tokens())
def test_tokens_come_back_as_they_were(given_tokens):
    assert same(BlockTokens.from_bytes(given_tokens.to_bytes()), given_tokens)


@given(tokens(), st.data())
def test_damage_is_seen_wherever_it_is(given_tokens, data):
    content = bytearray(given_tokens.to_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert BlockTokens.from_bytes(bytes(content)) is None
    assert (
        BlockTokens.from_bytes(bytes(content[: data.draw(st.integers(0, len(content) - 1))]))
        is None
    )


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Counts the blocks that are tokenised."""
    count = []
    make = BlockTokeniser._made
    monkeypatch.setattr(
        BlockTokeniser, "_made", lambda s, block: count.append(block) or make(s, block)
    )
    return count


def first_chunk(path, tokenizer, cache):
    data = data_of(path, tokenizer, longest=512, cache=cache)
    return next(data.chunks(chunk_tokens=512, most_documents=9, seed=0)).ids.tolist()


def test_a_block_is_made_once_and_again_if_the_cache_is_damaged(tmp_path, made):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text(lines_of([{"messages": CHAT}] * 3))
    folder = tokenizer_folder(tmp_path / "tokenizer")
    first = first_chunk(path, folder, cache)
    assert len(made) == 2  # of the sample and of the chunk
    assert first_chunk(path, folder, cache) == first
    assert len(made) == 3
    (kept,) = cache.rglob("*.tokens")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert first_chunk(path, folder, cache) == first
    assert len(made) == 5
    assert first_chunk(path, folder, cache) == first
    assert len(made) == 6
    assert len(list(cache.rglob("*"))) == 2, "nothing is left beside the file and its folder"


def test_other_content_or_another_recipe_has_another_file(tmp_path):
    cache = tmp_path / "cache"
    for name, text, template in (("a", "x", None), ("b", "y", None), ("b", "x", "{{ eos_token }}")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(lines_of([{"text": text}]))
        first_chunk(path, tokenizer_folder(tmp_path / "t", template), cache)
    assert len(list(cache.rglob("*.tokens"))) == 3


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_a_change_that_no_sample_of_a_large_file_shows_has_tokens_of_its_own(
    tmp_path, monkeypatch, kind
):
    """More than 4 GiB are hashed by samples; here a file of 4 KiB is, by its ends."""
    monkeypatch.setattr(files, "_HASHED_BYTES", 32)
    monkeypatch.setattr(files, "_PIECE_BYTES", 16)
    path, cache = tmp_path / f"a.{kind}", tmp_path / "cache"
    seen = []
    for word in ("before", "behind"):
        rows = [{"text": f"{word if number == 20 else 'a text'} {number}"} for number in range(40)]
        if kind == "parquet":
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(
                table, path, compression="none", use_dictionary=False, write_statistics=False
            )
        elif kind == "csv":
            path.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
        else:
            path.write_text(json.dumps(rows))
        os.utime(path, ns=(1, 1))
        chunks = data_of(path, cache=cache).chunks(chunk_tokens=1024, most_documents=64, seed=0)
        seen.append((path.stat().st_size, next(chunks).ids.tolist()))
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]
    assert len(list(cache.rglob("*.tokens"))) == 2


def test_the_beginning_and_the_end_of_a_text_are_not_its_middle(tmp_path):
    cache, folder = tmp_path / "cache", tokenizer_folder(tmp_path / "t", None, add_bos=True)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("the same text\n")
        first_chunk(tmp_path / f"{name}.txt", folder, cache)
    assert len(list(cache.rglob("*.tokens"))) == 1


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").touch()
    data = data_of(tmp_path / "a.txt", cache=tmp_path / "file")
    with pytest.raises(DataError, match=r"cannot (make the folder|read) .*file"):
        next(data.chunks(chunk_tokens=64, most_documents=9, seed=0))


def test_an_entry_that_is_not_there_is_none(tmp_path):
    assert TokenCache(tmp_path).get("ab" * 16) is None
