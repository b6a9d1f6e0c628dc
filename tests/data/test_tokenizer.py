"""Tokenizers: what goes around a text, where tokens lie in it, and what ends one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.samples import paragraphs, tokenizer_folder
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
