"""The shapes of rows that people have, beside what transformers and TRL make of the same."""

import json
from typing import Any

import pytest

from tests.data.samples import (
    CHATML,
    MARKED,
    an_epoch,
    data_of,
    documents,
    learned_text,
    lines_of,
    loaded,
    tokenizer_folder,
)
from twinstream.data.data_error import DataError
from twinstream.data.options import DataOptions
from twinstream.data.shapes import SHAPES, columns_of, shape_of

ASK, MORE = "Is it hot?", "In Paris."
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def rendered(messages: list[dict[str, Any]], template: str = CHATML, **more: Any) -> str:
    """By transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    texts, _ = render_jinja_template([messages], chat_template=template, **named, **more)
    return str(texts[0])


def read(tmp_path, rows, template=CHATML, name="rows.jsonl", **options):
    """What is learned of each document, and its text; of pairs in turn. And warnings."""
    path = tmp_path / name
    if name.endswith(".jsonl"):
        path.write_text(lines_of(rows))
    folder = tokenizer_folder(tmp_path / "tokenizer", template)
    data = data_of(path, folder, longest=512, options=DataOptions(workers=0, **options))
    chunks = an_epoch(data.chunks(chunk_tokens=1024, most_documents=100, seed=0))
    tokenizer = loaded(folder)
    learned = [text for chunk in chunks for text in learned_text(tokenizer, chunk)]
    texts = [
        tokenizer.decode(ids, skip_special_tokens=False)
        for chunk in chunks
        for ids, _ in documents(chunk)
    ]
    return learned, texts, " ".join(data.warnings)


CHATS = {
    "conversation": ({"conversation": [user(ASK), said("No.")]}, [user(ASK), said("No.")]),
    "dolly": (
        {"instruction": ASK, "context": MORE, "response": "No.", "category": "qa"},
        [user(f"{ASK}\n{MORE}"), said("No.")],
    ),
    "dolly without context": (
        {"instruction": ASK, "context": "", "response": "No."},
        [user(ASK), said("No.")],
    ),
    "ms-swift": (
        {"system": "Brief.", "history": [["a?", "b."]], "query": ASK, "response": "No."},
        [system("Brief."), user("a?"), said("b."), user(ASK), said("No.")],
    ),
    "question": (
        {"system": "Brief.", "question": ASK, "answer": "No.", "id": 3},
        [system("Brief."), user(ASK), said("No.")],
    ),
    "orca": ({"question": ASK, "response": "No."}, [user(ASK), said("No.")]),
    "input": ({"input": ASK, "output": "No."}, [user(ASK), said("No.")]),
    "prompt with response": ({"prompt": ASK, "response": "No."}, [user(ASK), said("No.")]),
    "system beside texts": (
        {"system": "Brief.", "prompt": ASK, "completion": "No."},
        [system("Brief."), user(ASK), said("No.")],
    ),
    "no messages beside texts": (
        {"messages": [], "query": f"{ASK}?", "response": "No."}, [user(f"{ASK}?"), said("No.")]
    ),
    "a completion that repeats the prompt": (
        {"prompt": [user(ASK)], "completion": [user(ASK), said("No.")]}, [user(ASK), said("No.")]
    ),
}  # fmt: skip


def test_rows_are_the_chats_that_transformers_renders(tmp_path):
    learned, texts, warned = read(tmp_path, [row for row, _ in CHATS.values()])
    wanted = {
        rendered(messages): "".join(f"{one['content']}<|im_end|>" for one in answers(messages))
        for _, messages in CHATS.values()
    }
    assert dict(zip(texts, learned, strict=True)) == wanted and len(texts) == len(CHATS)
    assert not warned


def answers(messages):
    return [one for one in messages if one["role"] == "assistant"]


PROMPTS = {
    "sharegpt": ({"conversations": [{"from": "human", "value": ASK}]}, [user(ASK)]),
    "alpaca": ({"instruction": ASK, "input": MORE}, [user(f"{ASK}\n{MORE}")]),
    "alpaca with history": (
        {"instruction": ASK, "input": "", "history": [["a?", "b."]]},
        [user("a?"), said("b."), user(ASK)],
    ),
    "orca": ({"system": "Brief.", "question": ASK}, [system("Brief."), user(ASK)]),
    "input": ({"input": ASK}, [user(ASK)]),
    "system beside texts": ({"system": "Brief.", "prompt": ASK}, [system("Brief."), user(ASK)]),
    "messages": ({"messages": [user(ASK)]}, [user(ASK)]),
}


FORMS = (
    lambda text: text,
    lambda text: {"from": "gpt", "value": text},
    said,
    lambda text: [said(text)],
)


@pytest.mark.parametrize("case", PROMPTS)
def test_both_answers_follow_the_prompt_wherever_it_stands(tmp_path, case):
    """Though they share a first word, and in each form of an answer."""
    row, prompt = PROMPTS[case]
    texts = {"chosen": "It is cold.", "rejected": "It is late."}
    rows = [row | {name: form(text) for name, text in texts.items()} for form in FORMS]
    learned, found, warned = read(tmp_path, rows, pairs=True)
    assert found == [rendered([*prompt, said(text)]) for text in texts.values()] * len(FORMS)
    assert learned == [f"{text}<|im_end|>" for text in texts.values()] * len(FORMS)
    assert not warned


REPEATED = {
    "messages": ({"prompt": [user(ASK)]}, [user(ASK)]),
    "without the system": ({"prompt": [system("Brief."), user(ASK)]}, [user(ASK)]),
    "sharegpt": ({"conversations": [{"from": "human", "value": ASK}]}, [user(ASK)]),
    "by other names": ({"prompt": [user(ASK)]}, [{"from": "human", "value": ASK}]),
    "the chosen chat": ({"messages": [user(ASK), said("No.")]}, [user(ASK)]),
    "turns": ({"prompt": [user("a?"), said("b."), user(ASK)]}, [user("a?"), said("b."), user(ASK)]),
    "a last question": ({"prompt": [user("a?"), said("b.")]}, [user(ASK)]),
}


def test_what_the_prompt_and_both_answers_share_is_there_once(tmp_path):
    rows = [
        row | {"chosen": [*again, said("No.")], "rejected": [*again, said("Yes.")]}
        for row, again in REPEATED.values()
    ]
    learned, texts, _ = read(tmp_path, rows, pairs=True)
    assert [text.count(ASK) for text in texts] == 2 * len(rows) * [1]
    assert learned == len(rows) * ["No.<|im_end|>", "Yes.<|im_end|>"]


def extracted(chosen: str, rejected: str) -> tuple[str, str, str]:
    """TRL's `extract_prompt` (trl/data_utils.py), of texts."""
    for at in range(min(len(chosen), len(rejected))):
        if chosen[at] != rejected[at]:
            at -= chosen[at - 1] == " "
            break
    return chosen[:at], chosen[at:], rejected[at:]


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "shared"),
    [
        ("Q: hot? A:", "Q: hot? A: no", "Q: hot? A: yes", "Q: hot? A:"),
        ("Q: hot? A: ", "Q: hot? A: no", "Q: hot? A: yes", "Q: hot? A: "),
        ("Q: hot?\n", "Q: hot? no", "Q: hot? yes", "Q: hot?"),
        ("No", "No, it", "No, I", "No"),
        ("Q: hot? A:", "Q: hot? A: no", " yes", "Q: hot? A:"),
    ],
)  # fmt: skip
def test_texts_that_begin_with_the_prompt_have_it_once(tmp_path, prompt, chosen, rejected, shared):
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    learned, texts, _ = read(tmp_path, [row], pairs=True)
    repeats = len(shared.split()) > 1 and rejected.startswith(shared)
    wanted = [one[len(shared) :] if repeats else one for one in (chosen, rejected)]
    assert texts == [f"{shared}{one}<|endoftext|>" for one in wanted]
    # A token of a space and a word is learned where the word is.
    assert [one.strip() for one in learned] == [f"{one.strip()}<|endoftext|>" for one in wanted]


def test_without_a_prompt_it_is_as_trl_extracts_it(tmp_path):
    pair = ("\n\nHuman: hot?\n\nAssistant: It is not.", "\n\nHuman: hot?\n\nAssistant: It may be.")
    prompt, chosen, _ = extracted(*pair)
    learned, texts, _ = read(
        tmp_path, [dict(zip(("chosen", "rejected"), pair, strict=True))], pairs=True
    )
    assert texts[0] == f"{prompt}{chosen}<|endoftext|>"
    assert learned[0].strip() == f"{chosen}<|endoftext|>".strip()


def test_a_completion_that_begins_with_the_prompt_is_told(tmp_path):
    row = {"prompt": "Q: hot? A:", "completion": "Q: hot? A: no"}
    learned, texts, warned = read(tmp_path, [row])
    assert (learned, texts) == ([" no<|endoftext|>"], ["Q: hot? A: no<|endoftext|>"])
    assert "1 whose completion begins with the prompt" in warned


@pytest.mark.parametrize(
    ("row", "template", "told"),
    [
        ({"system": "Brief.", "prompt": ASK, "completion": "No."}, None, "`system` is not used"),
        ({"system": "Brief.", "question": ASK, "answer": "No."}, None, "`system` is not used"),
        ({"messages": [user(ASK), said("No.")], "tools": TOOLS}, CHATML, "`tools` are not used"),
        ({"messages": [user(ASK), said("No.")], "tools": TOOLS}, WITH_TOOLS, ""),
        ({"messages": [user(ASK), said("No.")], "tools": json.dumps(TOOLS)}, CHATML, "`tools` are"),
        ({"text": "It is hot.", "system": "Brief."}, CHATML, "`system` is not used"),
        ({"prompt": ASK, "completion": "No.", "tools": TOOLS}, CHATML, "`tools` are not used"),
        ({"text": "It is hot.", "weight": 0.5}, CHATML, "`weight` is not used"),
        ({"text": "It is hot.", "loss_weight": 1.0, "train": True}, CHATML, ""),
        ({"prompt": ASK, "completion": "No.", "label": False}, CHATML, "`label` is not used"),
        ({"text": "It is hot.", "images": ["a.png"]}, CHATML, "`images` is not used"),
        ({"prompt": ASK, "completion": "No.", "history": [["a", "b"]]}, CHATML, "`history` is not"),
        ({"text": "It is hot.", "source": "me", "score": 3, "system": ""}, CHATML, ""),
    ],
)
def test_what_would_change_what_is_learned_is_used_or_told_with_its_count(
    tmp_path, row, template, told
):
    _, _, warned = read(tmp_path, [row] * 3, template)
    assert f"3 whose {told}" in warned if told else not warned
    assert warned.count("whose") <= 1
    assert "rows.jsonl:1" in warned or not told


@pytest.mark.parametrize(("weight", "ends"), [(0, "B."), (0.0, "B."), (False, "B."), (1.0, "A.B.")])
def test_a_turn_of_no_weight_is_not_learned_and_of_some_refused(tmp_path, weight, ends):
    """`loss_weight` is LLaMA-Factory's."""
    chat = [user("a?"), said("A.", loss_weight=weight), user("b?"), said("B.", loss_weight=1)]
    learned, _, _ = read(tmp_path, [{"messages": chat}])
    assert learned[0].replace("<|im_end|>", "") == ends
    chat[1]["loss_weight"] = 0.5
    with pytest.raises(DataError, match=r"`loss_weight` of message 2 .* needs to be 0 or 1"):
        read(tmp_path, [{"messages": chat}])


def test_columns_of_other_names_are_read_as_told(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"ask": f"{n}? ", "said": "Yes.", "prompt": "another"} for n in range(3)]
    columns = columns_of("prompt=ask, completion=said")
    wanted = [f"{n}? Yes.<|endoftext|>" for n in range(3)]
    _, texts, _ = read(tmp_path, rows, columns=columns)
    assert sorted(texts) == wanted
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    _, texts, _ = read(tmp_path, rows, name="rows.parquet", columns=columns)
    assert sorted(texts) == wanted
    pair = {"ask": "2? ", "good": "Yes.", "bad": "No."}
    columns = columns_of("prompt=ask,chosen=good,rejected=bad")
    _, texts, _ = read(tmp_path, [pair], pairs=True, columns=columns)
    assert texts == ["2? Yes.<|endoftext|>", "2? No.<|endoftext|>"]
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: the row has no `aks` \(columns: prompt=aks"
    ):
        read(tmp_path, rows, columns=columns_of("prompt=aks,completion=said"))
    for wrong in ("prompt", "prompt=", "promt=a", "prompt=a,prompt=b", "prompt=a,text=a"):
        with pytest.raises(DataError, match=f"columns '{wrong}'"):
            columns_of(wrong)
    with pytest.raises(DataError, match="'promt' is nothing that rows have"):
        DataOptions(columns=(("promt", "ask"),))


def test_columns_decide_what_data_it_is(tmp_path):
    (tmp_path / "rows.jsonl").write_text(lines_of([{"text": "It is hot.", "body": "It is cold."}]))
    found = {
        data_of(
            tmp_path / "rows.jsonl", options=DataOptions(workers=0, columns=columns)
        ).fingerprint
        for columns in ((), (("text", "body"),), (("text", "text"),))
    }
    assert len(found) == 3


def test_a_refusal_names_the_fields_that_are_there_and_the_option(tmp_path):
    with pytest.raises(DataError, match=r"it has ask, said: rename them, or .* --columns prompt="):
        read(tmp_path, [{"ask": ASK, "said": "No."}])
    for row in ({"ask": ASK}, {"turns": [user(ASK)]}):
        pair = {"chosen": "It is cold.", "rejected": "It is late."} | row
        with pytest.raises(DataError, match=f"--columns prompt={next(iter(row))}"):
            read(tmp_path, [pair], pairs=True)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("begun", ["The answer", "The answer ", " The\n"])
def test_a_turn_that_the_prompt_leaves_open_is_gone_on_with(tmp_path, template, begun):
    """As transformers prompts it: `continue_final_message`."""
    row = {"prompt": [user(ASK), said(begun)], "completion": [said("is no.")]}
    whole = rendered([user(ASK), said(f"{begun}is no.")], template)
    prompt = rendered([user(ASK), said(begun)], template, continue_final_message=True)
    learned, texts, _ = read(tmp_path, [row], template)
    assert texts == [whole]
    assert whole.startswith(prompt.rstrip())
    of_answer = len("ris no.<|im_end|>")  # a token may begin a letter before it
    assert learned[0].endswith("is no.<|im_end|>") and len(learned[0]) <= of_answer
    pair = {"prompt": row["prompt"], "chosen": "is no.", "rejected": "is yes."}
    learned, texts, _ = read(tmp_path, [pair], template, pairs=True)
    assert learned[1].endswith("is yes.<|im_end|>") and len(learned[1]) <= of_answer + 1
    assert texts[0] == whole


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("loss_on", ["completions", "all"])
def test_a_last_turn_that_is_left_open_is_not_closed(tmp_path, template, loss_on):
    chat = [user(ASK), said("It is "), user("Yes?"), said("It is ")]
    whole = rendered(chat, template, continue_final_message=True)
    for row in (
        {"messages": chat, "continue_final_message": True},
        {"messages": [*chat[:-1], {**chat[-1], "prefix": True}]},
    ):
        learned, texts, warned = read(tmp_path, [row], template, loss_on=loss_on)
        assert texts == [whole]
        assert learned[0].endswith("It is ") and "whose" not in warned


@pytest.mark.parametrize("template", [CHATML, "{{ messages[0].role and '' }}" + CHATML])
def test_a_chat_that_the_assistant_begins_does_not_teach_its_header(tmp_path, template):
    """Which stands in the prompt when it is asked; a template may refuse to render no message."""
    learned, _, _ = read(
        tmp_path, [{"messages": [said("Hello."), user(ASK), said("No.")]}], template
    )
    assert learned == ["Hello.<|im_end|>No.<|im_end|>"]


def test_each_shape_is_read_by_the_fields_that_it_needs(tmp_path):
    """Of the table every row, so that none is hidden behind another."""
    values = {"messages": [user(ASK), said("No.")], "ids": [1, 2, 3]}
    rows = [dict.fromkeys(one.needs, values.get(one.kind, "It is.")) for one in SHAPES]
    assert [shape_of(row) for row in rows] == list(SHAPES)
    assert len(read(tmp_path, rows)[1]) == len(SHAPES)


def test_pairs_that_are_the_same_when_cut_are_left_out_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    same = {"prompt": "Is it? ", "chosen": "x" * 80 + "a", "rejected": "x" * 80 + "b"}
    other = {"prompt": "Is it? ", "chosen": "No.", "rejected": "Yes."}
    path.write_text(lines_of([same, same, other]))
    data = data_of(path, options=DataOptions(workers=0, pairs=True))
    chunks = an_epoch(data.chunks(chunk_tokens=128, most_documents=8, seed=0))
    assert [chunk.num_pairs for chunk in chunks] == [1]
    assert "2 pairs left out, as their answers are the same in the first 64" in data.warnings[0]
