"""Tokenizers: what goes around a text, where tokens lie in it, and what ends one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.samples import paragraphs, tokenizer_folder
from twinstream.data.encoding import tokenizer as module
from twinstream.data.encoding.tokenizer import ByteTokenizer, FileTokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return FileTokenizer(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def word_pieces(tmp_path_factory):
    """As Llama 2's and Gemma's: no end of a word but a mark before each, and no offsets of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [chr(code) for code in range(33, 127)] + ["é", "\n", " "]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs()[:200], trainer)
    folder = tmp_path_factory.mktemp("pieces")
    tokenizer.save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("which", ["byte_level", "word_pieces", "bytes"])
@given(text=st.text("ab é\n<", max_size=40))
def test_each_character_is_of_a_token_in_order(request, which, text):
    tokenizer = ByteTokenizer() if which == "bytes" else request.getfixturevalue(which)
    (ids,), (located,) = tokenizer.encode([text]), tokenizer.locate([text])
    assert located.ids.tolist() == ids.tolist()
    covered = set()
    for start, end in zip(located.starts.tolist(), located.ends.tolist(), strict=True):
        covered |= set(range(start, end))
    assert covered >= {i for i, char in enumerate(text) if char != " "}
    assert (located.ends <= len(text)).all()
    assert located.starts.tolist() == sorted(located.starts.tolist())


@given(texts=st.lists(st.text("ab é\n<", max_size=60), max_size=5))
def test_a_long_text_is_encoded_in_pieces_of_which_few_are_held(byte_level, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CHARS", 8)
        patch.setattr(module, "_BATCH_CHARS", 20)
        batches = list(module._batches(texts))
        located, ids = byte_level.locate(texts), byte_level.encode(texts)
    assert all(len(piece) <= 8 for batch in batches for _, _, piece in batch)
    assert all(sum(len(piece) for _, _, piece in batch) < 28 for batch in batches)
    pieces = [piece for batch in batches for piece in batch]
    for index, (text, found) in enumerate(zip(texts, located, strict=True)):
        assert "".join(piece for of, _, piece in pieces if of == index) == text
        assert all(text.startswith(piece, at) for of, at, piece in pieces if of == index)
        assert ids[index].tolist() == found.ids.tolist()
        assert byte_level._tokenizer.decode(found.ids.tolist()) == text
        covered = set()
        for start, end in zip(found.starts.tolist(), found.ends.tolist(), strict=True):
            covered |= set(range(start, end))
        assert covered >= {i for i, char in enumerate(text) if char != " "}


def test_a_text_in_pieces_has_the_tokens_of_the_whole(byte_level, monkeypatch):
    text = "\n\n".join(paragraphs()[:60])
    (whole,) = byte_level.encode([text])
    monkeypatch.setattr(module, "_PIECE_CHARS", 500)
    assert len(list(module._pieces(text))) > 10
    (in_pieces,) = byte_level.encode([text])
    assert in_pieces.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        ("$A", [], [0]),
        ("<s> $A", [3], [0]),
        ("$A <|im_end|>", [], [2, 0]),
        ("$A <|endoftext|>", [], [0]),
    ],
)
def test_the_end_token_follows_once(tmp_path, template, before, after):
    from tokenizers import Tokenizer, processors

    folder = tokenizer_folder(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "<|im_end|>", "<|endoftext|>")]
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=known)
    tokenizer.save(str(folder / "tokenizer.json"))
    found = FileTokenizer(folder)
    assert (found.before.tolist(), found.after.tolist()) == (before, after)


def test_generation_stops_where_the_folder_says(tmp_path):
    folder = tokenizer_folder(tmp_path)
    assert set(FileTokenizer(folder).special.stops) == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    }
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 70]}))
    stops = FileTokenizer(folder).special.stops
    assert stops["<|endoftext|>"] == 0
    assert 70 in stops.values()


def test_special_tokens_may_be_named_in_a_file_of_their_own(tmp_path):
    folder = tokenizer_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert FileTokenizer(folder).after.tolist() == []
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert FileTokenizer(folder).after.tolist() == [2]


def test_a_mark_before_a_text_is_not_before_each_of_its_pieces(tmp_path, monkeypatch):
    """As Llama 2's normalizer has it; beside the library, which takes the text whole."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    alphabet = [chr(code) for code in range(33, 127)] + ["▁", "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["is", "a", "word", "of", "a", "text", "in", "it"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "\n\n".join(paragraphs()[:60])
    monkeypatch.setattr(module, "_PIECE_CHARS", 500)
    ours = FileTokenizer(tmp_path)
    (found,), (located,) = ours.encode([text]), ours.locate([text])
    assert found.tolist() == tokenizer.encode(text).ids == located.ids.tolist()
