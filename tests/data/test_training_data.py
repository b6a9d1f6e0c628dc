"""Training data as a whole: each document once an epoch, gone on with at any chunk."""

import json
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.samples import HERE, an_epoch, data_of, documents, lines_of, loaded, paragraphs
from tests.data.samples import tokenizer_folder as folder_of
from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokeniser import BlockTokeniser
from twinstream.data.options import DataOptions, Source
from twinstream.data.order import Position, shuffled
from twinstream.data.training_data import TrainingData

pytestmark = pytest.mark.usefixtures("small_blocks")
SHAPE = {"chunk_tokens": 256, "most_documents": 60}


def texts(count: int, name: str = "document") -> list[str]:
    """Short texts, all different."""
    return [f"{name} {index}. {paragraphs()[index][:40]}" for index in range(count)]


def write_rows(path, count: int, name: str = "document"):
    path.write_text(lines_of({"text": text} for text in texts(count, name)))
    return path


def text_of(chunks) -> list[str]:
    """Texts of all documents, in the order in which they come."""
    return [bytes(ids).decode() for chunk in chunks for ids, _ in documents(chunk)]


def same(a, b) -> bool:
    return (
        a.lengths == b.lengths
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.labels, b.labels)
    )


def test_each_document_comes_once_an_epoch_in_another_order(tmp_path):
    data = data_of(write_rows(tmp_path / "a.jsonl", 200))
    stream = data.chunks(**SHAPE, seed=3)
    first, second = text_of(an_epoch(stream)), text_of(an_epoch(stream))
    assert sorted(first) == sorted(second) == sorted(texts(200))
    assert first != second
    assert stream.position.epoch == 2


def test_the_seed_decides_the_order_and_nothing_else(tmp_path):
    data = data_of(write_rows(tmp_path / "a.jsonl", 100))
    once, again, other = (text_of(an_epoch(data.chunks(**SHAPE, seed=s))) for s in (3, 3, 4))
    assert once == again != other


@settings(max_examples=12)
@given(st.integers(0, 70), st.integers(0, 3))
def test_from_any_chunk_on_a_stream_goes_on_as_it_would_have(tmp_path_factory, behind, seed):
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "a.jsonl", 150)
    (folder / "b.txt").write_text("\n\n".join(paragraphs()[:60]))
    sources = [Source(folder / "a.jsonl", 0.4), Source(folder / "b.txt", 1.5)]
    data = TrainingData.open(sources, None, longest=100, options=HERE)
    whole = data.chunks(**SHAPE, seed=seed)
    for _ in range(behind):
        next(whole)
    kept = Position(**json.loads(json.dumps(asdict(whole.position))))
    again = TrainingData.open(sources, None, longest=100, options=HERE)
    resumed = again.chunks(**SHAPE, seed=seed, start=kept)
    for _ in range(15):
        assert same(next(whole), next(resumed))
        assert whole.position == resumed.position


def test_the_order_of_a_seed_is_that_of_all_versions():
    assert shuffled(8, "blocks", 7, 0).tolist() == [6, 1, 0, 7, 4, 2, 3, 5]


@pytest.mark.parametrize("weight", [0.25, 1.5, 2.0])
def test_a_weight_is_how_often_an_epoch_has_a_source(tmp_path, weight):
    sources = [
        Source(write_rows(tmp_path / "a.jsonl", 80, "a")),
        Source(write_rows(tmp_path / "b.jsonl", 60, "b"), weight),
    ]
    data = TrainingData.open(sources, None, longest=64, options=HERE)
    stream = data.chunks(**SHAPE, seed=0)
    epochs = [text_of(an_epoch(stream)) for _ in range(4)]
    for epoch in epochs:
        assert sorted(t for t in epoch if t[0] == "a") == sorted(texts(80, "a"))
        assert abs(sum(t[0] == "b" for t in epoch) - 60 * weight) <= 2
    seen = Counter(t for epoch in epochs for t in epoch if t[0] == "b")
    assert seen == dict.fromkeys(texts(60, "b"), 4 * weight)


def test_a_tiny_weight_alone_gives_documents_in_some_epochs(tmp_path):
    source = Source(write_rows(tmp_path / "a.jsonl", 4), 0.01)
    data = TrainingData.open([source], None, longest=64, options=HERE)
    stream = data.chunks(**SHAPE, seed=0)
    found = [stream.position.epoch for _ in range(4) if next(stream)]
    assert text_of([next(stream)])
    assert found == sorted(set(found)), "one document at a time"


def test_a_text_file_begins_and_ends_once_however_many_blocks_it_has(tmp_path):
    text = "\n\n".join(paragraphs()[:100])
    (tmp_path / "a.txt").write_text(text)
    folder = folder_of(tmp_path / "tokenizer", None, add_bos=True)
    data = data_of(tmp_path / "a.txt", folder)
    assert len(data.blocks[0]) > 10
    tokeniser = BlockTokeniser(data.encoding, None)
    ids = np.concatenate([tokeniser.tokens(block).ids for block in data.blocks[0]])
    whole = loaded(folder).decode(ids.tolist(), skip_special_tokens=False)
    assert whole == f"<s>{text}<|endoftext|>"
    stream = data.chunks(**SHAPE, seed=0)
    packed = sum(len(ids) for chunk in an_epoch(stream) for ids, _ in documents(chunk))
    assert len(ids) - packed < len(data.blocks[0]), "but for single tokens"


def test_the_vocabulary_is_checked_of_what_the_cache_gives_too(tmp_path):
    path, cache = write_rows(tmp_path / "a.jsonl", 200), tmp_path / "cache"
    an_epoch(data_of(path, cache=cache).chunks(**SHAPE, seed=0))
    data = replace(
        data_of(path, cache=cache), encoding=replace(data_of(path).encoding, vocab_size=97)
    )
    with pytest.raises(DataError, match=r"a.jsonl:\d+: token id 1\d\d is outside the model's"):
        next(data.chunks(**SHAPE, seed=0))


def test_long_rows_are_cut_and_text_is_cut_to_fill(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of([{"text": "abcdefghij" * 10}]))
    chunk = next(data_of(tmp_path / "a.jsonl", longest=40).chunks(**SHAPE, seed=0))
    assert sorted(text_of([chunk])) == ["abcdefghij" * 2, "abcdefghij" * 4, "abcdefghij" * 4]
    (tmp_path / "b.txt").write_text("abcdefghij" * 1000)
    stream = data_of(tmp_path / "b.txt", longest=100).chunks(**SHAPE, seed=0)
    assert len(an_epoch(stream)) == -(-10_000 // 256)
    assert stream.fill == 10_000 / (40 * 256)


def test_a_long_row_is_refused_by_choice_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of([{"text": "a"}, {"text": "b" * 65}]))
    options = DataOptions(long_documents="refuse", workers=0)
    stream = data_of(path, options=options).chunks(**SHAPE, seed=0)
    with pytest.raises(DataError, match=r"a.jsonl:2: 65 tokens, and the longest document is 64"):
        next(stream)


def test_lengths_are_those_of_the_pieces_that_are_packed(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 10)
    sampled = data_of(path, longest=30).lengths()
    stream = data_of(path, longest=30).chunks(**SHAPE, seed=0)
    packed = [len(ids) for chunk in an_epoch(stream) for ids, _ in documents(chunk)]
    assert set(sampled.tolist()) <= set(packed)
    assert sampled.max() == 30
    (tmp_path / "b.txt").write_text("abcdefghij" * 1000)
    assert set(data_of(tmp_path / "b.txt", longest=50).lengths().tolist()) == {50}


def test_lines_longer_than_blocks_are_looked_at(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of([{"text": "abcdefghij" * 10_000}] * 3))
    data = data_of(tmp_path / "a.jsonl", longest=50)
    assert len(data.blocks[0]) > 400
    assert data.lengths().tolist() == [50] * 6000
    assert data.epoch_tokens == 300_000


def test_the_tokens_of_an_epoch_are_estimated(tmp_path):
    sources = [
        Source(write_rows(tmp_path / "a.jsonl", 400), 0.5),
        Source(tmp_path / "b.txt", 3),
    ]
    (tmp_path / "b.txt").write_text("\n\n".join(paragraphs()[:100]))
    data = TrainingData.open(sources, None, longest=64, options=HERE)
    stream = data.chunks(**SHAPE, seed=0)
    packed = sum(256 - chunk.num_padding for chunk in an_epoch(stream))
    assert data.epoch_tokens == pytest.approx(packed, rel=0.1)


def test_small_files_are_sampled_together(tmp_path):
    for index in range(30):
        (tmp_path / f"{index}.txt").write_text("x" * (index + 10))
    assert sorted(data_of(tmp_path).lengths().tolist()) == list(range(10, 40))


def test_the_fingerprint_is_of_content_and_recipe_and_not_of_places(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 10)
    plain = data_of(path)
    (tmp_path / "moved").mkdir()
    moved = write_rows(tmp_path / "moved/b.jsonl", 10)
    workers = DataOptions(workers=3)
    assert data_of(moved, options=workers, cache=tmp_path / "c").fingerprint == plain.fingerprint
    others = [
        data_of(write_rows(tmp_path / "c.jsonl", 10, "dokument")),
        data_of(path, longest=65),
        data_of(path, options=DataOptions(loss_on="all", workers=0)),
        data_of(path, options=DataOptions(long_documents="refuse", workers=0)),
        data_of(path, folder_of(tmp_path / "t")),
        data_of(path, folder_of(tmp_path / "u", "{{ bos_token }}")),
        TrainingData.open([Source(path, 2)], None, longest=64, options=HERE),
    ]
    assert len({plain.fingerprint, *(other.fingerprint for other in others)}) == 8
    assert plain.gone_on_with(plain.fingerprint, None) is plain
    for record in (None, others[0].record, plain.record):
        with pytest.raises(DataError, match="not that of the checkpoint"):
            plain.gone_on_with(others[1].fingerprint, record)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"chunk_tokens": 512}, {"most_documents": 61}])
def test_a_position_of_another_order_is_refused(tmp_path, changed):
    data = data_of(write_rows(tmp_path / "a.jsonl", 50))
    arguments = {**SHAPE, "seed": 0}
    stream = data.chunks(**arguments)
    next(stream)
    with pytest.raises(DataError, match="another order of the data"):
        data.chunks(**(arguments | changed), start=stream.position)


def test_a_position_that_is_none_is_refused(tmp_path):
    data = data_of(write_rows(tmp_path / "a.jsonl", 50))
    with pytest.raises(DataError, match="is in group 9 of the data, which has 1"):
        data.chunks(**SHAPE, seed=0, start=Position(group=9))


def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of([{"text": "az"}, {"text": "a~"}]))
    data_of(path, vocab_size=127)
    with pytest.raises(DataError, match=r"a.jsonl:2: token id 126.*vocabulary of 126 ids"):
        data_of(path, vocab_size=126)
    np.array([5, 300], "<u2").tofile(tmp_path / "b.bin")
    with pytest.raises(DataError, match=r"b.bin: token id 300 .*vocabulary of 256 ids \(0 to 255"):
        data_of(tmp_path / "b.bin", vocab_size=256)
