"""Packing: every document once, nothing too long, and full chunks."""

from itertools import cycle, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.samples import paragraphs
from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.packing import ChunkShape, chunk_of, pack
from twinstream.data.spans import cut, sizes_for
from twinstream.schedule.workload import PADDING_LABEL


@st.composite
def shapes(draw):
    longest = draw(st.integers(2, 30))
    chunk_tokens = draw(st.integers(longest, 100))
    least = 1 + -(-(chunk_tokens - 1) // longest)
    return ChunkShape(chunk_tokens, longest, draw(st.integers(least, least + 40)))


@st.composite
def blocks(draw):
    """Tokens that are all different, so that each can be found again."""
    lengths = draw(st.lists(st.integers(0, 70), max_size=40))
    total = sum(lengths)
    learned = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    return BlockTokens(
        np.arange(1, total + 1, dtype=np.int32),
        np.array(learned, np.bool_) | draw(st.booleans()),
        np.cumsum(lengths, dtype=np.int64),
        np.arange(len(lengths)),
    )


def cut_by_hand(tokens, sizes):
    """Ids of the pieces in which a token after the first is learned.

    A document with a prompt is not gone on with: an answer stays with what it answers.
    """
    found, start = [], 0
    for end in tokens.ends.tolist():
        has_prompt = not tokens.learned[start + 1 : end].all()
        turn = cycle(sizes) if end - start > sizes[0] else cycle([sizes[0]])
        at = start
        while at < end:
            stop = min(at + next(turn), end)
            if tokens.learned[at + 1 : stop].any():
                found.append(tokens.ids[at:stop].tolist())
            at = end if has_prompt else stop
        start = end
    return found


def one_by_one(lengths, shape):
    """First-fit decreasing as it is defined, document by document."""
    bins = []
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        for chunk in bins:
            free = shape.chunk_tokens - sum(int(lengths[i]) for i in chunk) - length
            entries = len(chunk) + 1 + -(-free // shape.longest)
            if free >= 0 and entries <= shape.most_documents:
                chunk.append(index)
                break
        else:
            bins.append([index])
    return bins


@given(shapes(), st.data())
def test_packing_is_first_fit_decreasing(shape, data):
    lengths = np.array(data.draw(st.lists(st.integers(1, shape.longest), max_size=60)), np.int64)
    assert [found.tolist() for found in pack(lengths, shape)] == one_by_one(lengths, shape)


@given(blocks(), shapes(), st.booleans())
def test_each_learned_token_is_in_one_chunk_beside_its_own_document_only(tokens, shape, continuous):
    sizes = sizes_for(shape.longest, shape.chunk_tokens, is_continuous=continuous)
    spans = cut(tokens, sizes)
    chunks = [chunk_of(spans, indices, shape) for indices in pack(spans.lengths, shape)]
    packed = []
    for chunk in chunks:
        assert sum(chunk.lengths) == shape.chunk_tokens == len(chunk.ids) == len(chunk.labels)
        assert max(chunk.lengths) <= shape.longest
        assert len(chunk.lengths) <= shape.most_documents
        edges = np.cumsum((0, *chunk.lengths))
        for start, end in pairwise(edges):
            ids, labels = chunk.ids[start:end], chunk.labels[start:end]
            if start >= shape.chunk_tokens - chunk.num_padding:
                assert (ids == 0).all() and (labels == PADDING_LABEL).all()
                continue
            packed.append(ids.tolist())
            learned = [i + 1 if tokens.learned[i] else -100 for i in ids[:-1]]
            assert labels.tolist() == [*learned, -100]
    assert sorted(packed) == sorted(cut_by_hand(tokens, sizes))


@given(blocks(), shapes())
def test_in_text_that_is_learned_whole_nothing_but_single_tokens_is_left_out(tokens, shape):
    whole = BlockTokens(tokens.ids, np.ones(len(tokens.ids), np.bool_), tokens.ends, tokens.rows)
    spans = cut(whole, (shape.longest,))
    lengths = np.diff(tokens.ends, prepend=0)
    alone = sum(int(length) % shape.longest == 1 for length in lengths)
    assert spans.lengths.sum() == len(tokens.ids) - alone


@pytest.mark.parametrize(("chunk_tokens", "longest"), [(4096, 4096), (8192, 2048), (10000, 3000)])
def test_a_continuous_text_leaves_no_padding_but_in_its_last_chunk(chunk_tokens, longest):
    shape = ChunkShape(chunk_tokens, longest, 8)
    num = chunk_tokens * 12 + 17
    learned = np.ones(num, np.bool_)
    tokens = BlockTokens(np.ones(num, np.int32), learned, np.array([num]), np.zeros(1, np.int64))
    spans = cut(tokens, sizes_for(longest, chunk_tokens, is_continuous=True))
    chunks = pack(spans.lengths, shape)
    assert spans.lengths.sum() == num
    assert len(chunks) == 13


def log_normal():
    draws = np.random.default_rng(0).lognormal(5.5, 1.2, 6000)
    return np.clip(draws, 2, 4096).astype(np.int64)


@pytest.mark.parametrize(
    "lengths",
    [log_normal(), np.array([min(4096, len(p.encode())) for p in paragraphs()])],
    ids=["log-normal", "help-paragraphs"],
)
@pytest.mark.parametrize("chunk_tokens", [4096, 8192])
def test_chunks_of_real_lengths_are_at_least_97_percent_full(lengths, chunk_tokens):
    shape = ChunkShape(chunk_tokens, 4096, 1024)
    chunks = pack(lengths, shape)
    assert lengths.sum() / (len(chunks) * chunk_tokens) >= 0.97


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((10, 20, 5), r"chunk of 10 tokens cannot hold documents of up to 20"),
        ((10, 0, 50), r"longest needs from 1 token"),
        ((64, 16, 4), r"4 document\(s\) a chunk are too few.*at least 5"),
    ],
)
def test_an_impossible_shape_is_refused_with_its_numbers(shape, message):
    with pytest.raises(DataError, match=message):
        ChunkShape(*shape)
