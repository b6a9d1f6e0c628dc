"""Pairs of answers: read from each form of row, and packed into one chunk each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.samples import an_epoch, data_of, documents, lines_of, loaded, tokenizer_folder
from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.options import DataOptions
from twinstream.data.packing import ChunkShape, chunk_of, pack
from twinstream.data.spans import cut
from twinstream.schedule.workload import PADDING_LABEL

PAIRS = DataOptions(workers=0, pairs=True)
ASKED = {"role": "user", "content": "2 + 2?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("Four.", "Five, I think."))
TEXTS = {"prompt": "2 + 2 is ", "chosen": "four.", "rejected": "five, I think."}
LIKE_TRLS = {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}
WHOLE = {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}


def only_pair(folder, row, **options):
    """Texts of the chosen and the rejected document, each with what is learned of it."""
    path = folder / "rows.jsonl"
    path.write_text(lines_of([row]))
    data = data_of(path, longest=128, options=PAIRS, **options)
    chunk = next(data.chunks(chunk_tokens=256, most_documents=8, seed=0))
    assert chunk.num_pairs == 1
    found = []
    for place in chunk.documents:
        labels = chunk.labels[place]
        learned = bytes(labels[labels >= 0].astype(np.uint8)).decode(errors="replace")
        found.append((bytes(chunk.ids[place].astype(np.uint8)).decode(errors="replace"), learned))
    return found


@pytest.mark.parametrize(
    "row",
    [TEXTS, {name: "2 + 2 is " + TEXTS[name] for name in ("chosen", "rejected")},
     TEXTS | {"prompt": "2 + 2 is f", "chosen": "our.", "rejected": "ive, I think."}],
    ids=["prompt", "what both begin with", "a prompt within a word"],
)  # fmt: skip
def test_texts(tmp_path, row):
    chosen, rejected = only_pair(tmp_path, row)
    assert chosen[0].startswith("2 + 2 is four.")
    assert rejected[0].startswith("2 + 2 is five, I think.")
    prompt = row.get("prompt", "2 + 2 is ")
    assert chosen[1].startswith("2 + 2 is four."[len(prompt) :])
    assert rejected[1].startswith("2 + 2 is five, I think."[len(prompt) :])


@pytest.mark.parametrize(
    "row",
    [LIKE_TRLS, WHOLE, WHOLE | {"prompt": "2 + 2?"},
     {"prompt": [ASKED], "chosen": RIGHT, "rejected": WRONG},
     {"prompt": "2 + 2?", "chosen": [RIGHT], "rejected": [WRONG]},
     {"prompt": [ASKED], "chosen": "Four.", "rejected": "Five, I think."}],
    ids=["prompt", "what both begin with", "a text as a prompt, too", "single messages",
         "a text before messages", "texts behind messages"],
)  # fmt: skip
def test_conversations(tmp_path, row):
    folder, path = tokenizer_folder(tmp_path), tmp_path / "rows.jsonl"
    path.write_text(lines_of([row]))
    data = data_of(path, longest=128, options=PAIRS, tokenizer=folder)
    chunk = next(data.chunks(chunk_tokens=256, most_documents=8, seed=0))
    assert chunk.num_pairs == 1
    decode = loaded(folder).decode
    texts, learned = [], []
    for place in chunk.documents:
        labels = chunk.labels[place]
        texts.append(decode(chunk.ids[place].tolist(), skip_special_tokens=False))
        learned.append(decode(labels[labels >= 0].tolist(), skip_special_tokens=False))
    assert [text.count("2 + 2?") for text in texts] == [1, 1]
    assert learned == ["Four.<|im_end|>", "Five, I think.<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "no pair"}, "lacks `chosen` or `rejected`; it has text"),
        (TEXTS | {"rejected": None}, "lacks `chosen` or `rejected`"),
        (TEXTS | {"rejected": [WRONG]}, "`chosen` is text and `rejected` a list"),
        (TEXTS | {"chosen": 4, "rejected": 5}, "both need to be text, or lists"),
        ({"chosen": "2 + 2 ", "rejected": "2 + 2 "}, "are the same"),
        (TEXTS | {"rejected": TEXTS["chosen"]}, "are the same"),
        (TEXTS | {"chosen": ""}, "`chosen` is empty"),
        ({"chosen": "Four.", "rejected": "Five."}, "begin with is nothing"),
        ({"ask": "2 + 2?", "chosen": "It is 4.", "rejected": "It is 5."}, "--columns prompt=ask"),
        ({"chosen": "2 + ", "rejected": "2 + 2"}, "begin with is all of one of them"),
        (TEXTS | {"prompt": 5}, "`prompt` needs to be text or a list of messages"),
        (LIKE_TRLS, "no chat template"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(tmp_path, row, why):
    with pytest.raises(DataError, match=f"rows.jsonl:1.*{why}"):
        only_pair(tmp_path, row)


def test_text_is_refused_and_rows_of_pairs_are_where_nobody_asks_for_them(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    with pytest.raises(DataError, match=r"a\.txt is text, and the loss is of pairs"):
        data_of(path, options=PAIRS)
    path = tmp_path / "rows.jsonl"
    path.write_text(lines_of([TEXTS]))
    with pytest.raises(DataError, match="--loss dpo"):
        data_of(path, options=DataOptions(workers=0))


def test_a_bad_row_is_skipped_as_a_pair(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [TEXTS, {"prompt": "2"}, TEXTS | {"chosen": "4."}]
    path.write_text(lines_of(rows))
    data = data_of(path, options=DataOptions(workers=0, pairs=True, skip_bad_rows=1))
    chunks = an_epoch(data.chunks(chunk_tokens=256, most_documents=60, seed=0))
    assert sum(chunk.num_pairs for chunk in chunks) == 2
    texts = [bytes(ids).decode() for chunk in chunks for ids, _ in documents(chunk)]
    assert sorted(text[:11] for text in texts) == [
        "2 + 2 is 4.",
        *2 * ["2 + 2 is fi"],
        "2 + 2 is fo",
    ]


@st.composite
def pairs(draw):
    """Documents two by two, some with nothing to learn."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=2, max_size=40))
    lengths = np.array(lengths[: len(lengths) // 2 * 2])
    total = int(lengths.sum())
    learned = np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    ids = np.arange(total, dtype=np.int32)
    return BlockTokens(ids, learned, np.cumsum(lengths), np.arange(len(lengths)) // 2)


@given(pairs(), st.integers(2, 20), st.integers(0, 30), st.integers(0, 6))
def test_both_documents_of_a_pair_are_in_one_chunk_and_teach(tokens, longest, more, room):
    chunk_tokens = 2 * longest + more
    most = 2 + -(-(chunk_tokens - 2) // longest) + room
    shape = ChunkShape(chunk_tokens, longest, most, sides=2)
    spans = cut(tokens, (longest,), 2)
    found = []
    for indices in pack(spans.totals, shape):
        chunk = chunk_of(spans, indices, shape)
        assert len(chunk.lengths) <= most
        assert sum(chunk.lengths) == chunk_tokens
        places = list(chunk.documents)
        assert len(places) == 2 * chunk.num_pairs
        for chosen, rejected in zip(places[::2], places[1::2], strict=True):
            found.append((chunk.ids[chosen].tolist(), chunk.ids[rejected].tolist()))
            assert all((chunk.labels[place] >= 0).any() for place in (chosen, rejected))
        assert (chunk.labels[chunk_tokens - chunk.num_padding :] == PADDING_LABEL).all()
    starts, ends = np.concatenate([[0], tokens.ends[:-1]]), tokens.ends
    expected = []
    for i in range(0, len(ends), 2):
        kept = [(starts[j], min(ends[j], starts[j] + longest)) for j in (i, i + 1)]
        if all(tokens.learned[a + 1 : b].any() for a, b in kept):
            expected.append(tuple(tokens.ids[a:b].tolist() for a, b in kept))
    assert sorted(found) == sorted(expected)


def test_a_chunk_too_small_for_a_pair_is_refused():
    with pytest.raises(DataError, match="both documents of a pair, of up to 16 tokens each"):
        ChunkShape(31, 16, 8, sides=2)
