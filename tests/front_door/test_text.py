"""Text as training data: windows of a token stream."""

import numpy as np
import pytest

from twinstream.commands.arguments.tokens import token_stream
from twinstream.data.text import (
    TextBatches,
    TextError,
    byte_tokens,
    check_vocabulary,
    default_text,
    read_text,
)
from twinstream.schedule.workload import Workload

WORKLOAD = Workload(seq_len=8, chunk_tokens=4, chunks_per_round=2, rounds_per_step=3)
NUM_CHUNKS = 6


def batches(length: int = 1000) -> TextBatches:
    """A stream in which every token is its own position."""
    return TextBatches(np.arange(length, dtype=np.int32), WORKLOAD)


def test_labels_are_the_next_tokens():
    ids, labels = batches().chunk(1, 0)
    assert ids.tolist() == [0, 1, 2, 3]
    assert labels.tolist() == [1, 2, 3, 4]


def test_a_slice_goes_on_where_the_one_before_stopped():
    stream = batches()
    for index in range(1, NUM_CHUNKS):
        last_label = stream.chunk(1, index - 1)[1][-1]
        assert stream.chunk(1, index)[0][0] == last_label


def test_chunks_of_all_rounds_and_steps_are_disjoint():
    stream = batches()
    chunks = [stream.chunk(step, index)[0] for step in (1, 2, 3) for index in range(NUM_CHUNKS)]
    seen = np.concatenate(chunks).tolist()
    assert len(seen) == len(set(seen)) == 3 * WORKLOAD.tokens_per_step
    assert sorted(seen) == list(range(72))


def test_the_stream_wraps_around():
    ids, labels = batches(10).chunk(1, 2)
    assert ids.tolist() == [8, 9, 0, 1]
    assert labels.tolist() == [9, 0, 1, 2]


def test_a_stream_shorter_than_a_chunk_still_gives_whole_chunks():
    ids, labels = batches(3).chunk(1, 0)
    assert ids.tolist() == [0, 1, 2, 0]
    assert labels.tolist() == [1, 2, 0, 1]


def test_chunks_are_what_the_executor_takes():
    chunk = batches().chunk(2, 5)
    assert chunk.shape == (2, 4)
    assert chunk.dtype == np.int32


def test_every_byte_is_a_token():
    assert byte_tokens(b"\x00aZ\xff").tolist() == [0, 97, 90, 255]


def test_the_default_text_is_long_prose():
    text = default_text()
    assert len(text) > 100_000
    assert b"assert" in text


def test_a_token_outside_the_vocabulary_is_refused_with_both_numbers():
    tokens = np.array([3, 255, 7], dtype=np.int32)
    check_vocabulary(tokens, 256)
    with pytest.raises(TextError, match=r"id 255.*255 ids"):
        check_vocabulary(tokens, 255)


def test_a_text_file_needs_two_bytes(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"ab")
    assert read_text(path) == b"ab"
    path.write_bytes(b"a")
    with pytest.raises(TextError, match="1 byte"):
        read_text(path)


def test_the_token_stream_is_the_bytes_of_the_file(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"abc")
    assert token_stream(path, None).tolist() == [97, 98, 99]


def test_a_tokenizer_json_makes_the_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"one": 5, "two": 9, "[UNK]": 0}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    definition, text = tmp_path / "tokenizer.json", tmp_path / "text"
    tokenizer.save(str(definition))
    text.write_text("two one three two")
    tokens = token_stream(text, definition)
    assert tokens.tolist() == [9, 5, 0, 9]
    assert tokens.dtype == np.int32
    text.write_text("one")
    with pytest.raises(TextError, match="1 token"):
        token_stream(text, definition)
    text.write_bytes(b"one \xff")
    with pytest.raises(TextError, match="byte 4"):
        token_stream(text, definition)


def test_without_the_tokenizers_package_the_message_says_so(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TextError, match="pip install tokenizers"):
        token_stream(None, tmp_path / "tokenizer.json")
