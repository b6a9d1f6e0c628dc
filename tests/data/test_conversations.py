"""Rows as people have them: what is learned of them, and what is told of the rest."""

import json

import pytest

from tests.data.samples import (
    CHAT,
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

EVERYTHING = DataOptions(loss_on="all", workers=0)
WITH_CALLS = CHATML.replace(
    "+ '<|im_end|>'",
    "}}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>'",
)
# As DeepSeek-V3's: a call is rendered where the content is null, and its arguments are JSON.
WANTS_NULL_AND_JSON = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is none %}{% for c in m.tool_calls %}
{{- c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As SmolVLM's.
WANTS_PARTS = CHATML.replace(
    "+ message['content'] +",
    "}}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{{",
)
# As Qwen3's: the last turn has room for a thought, earlier ones have none.
THINKING = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As DeepSeek-R1's: a prompt opens a thought, and no turn shows one.
OPENS_A_THOUGHT = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{{- m.content.split('</think>')[-1] + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


def user(content):
    return {"role": "user", "content": content}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def called(name, content="", **arguments):
    function = {"name": name, "arguments": arguments}
    return said(content, tool_calls=[{"type": "function", "function": function}])


def read(tmp_path, rows, template=CHATML, *, longest=1024, name="rows.jsonl", **more):
    """What is learned of each document, each as a whole, and the warnings."""
    path = tmp_path / name
    path.write_text(json.dumps(rows) if name.endswith(".json") else lines_of(rows))
    return read_file(tmp_path, path, template, longest=longest, **more)


def read_file(tmp_path, path, template=CHATML, *, longest=1024, add_bos=False, **more):
    folder = tokenizer_folder(tmp_path / "tokenizer", template, add_bos=add_bos)
    tokenizer = loaded(folder)
    data = data_of(path, folder, longest=longest, **more)
    chunks = an_epoch(data.chunks(chunk_tokens=longest, most_documents=longest, seed=0))
    texts = [
        tokenizer.decode(ids, skip_special_tokens=False)
        for chunk in chunks
        for ids, _ in documents(chunk)
    ]
    learned = [text for chunk in chunks for text in learned_text(tokenizer, chunk)]
    return learned, texts, data.warnings


def test_parquet_gives_the_text_of_the_same_rows_as_lines(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "messages": [user("Hot?"), called("weather", city="Paris")],
            "tools": [{"name": "weather"}],
        },
        {"messages": [user("Late?"), called("clock", content="x", zone="CET", content_=1)]},
    ]
    rows[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["content"] = "y"
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    template = "{{ tools | tojson }}" + WITH_CALLS
    by_lines, texts, _ = read(tmp_path, rows, template)
    assert '{"name": "weather", "arguments": {"city": "Paris"}}<|im_end|>' in by_lines
    by_table, table_texts, _ = read_file(tmp_path, path, template)
    assert sorted(by_table) == sorted(by_lines)
    assert sorted(table_texts) == sorted(texts)


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"training": 0.0}, {"loss": 0}])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by-prefixes", "by-marks"])
def test_a_turn_that_is_not_to_be_learned_is_read_and_not_learned(tmp_path, flag, template):
    chat = [user("Hot?"), said("Bad.", **flag), user("Cold?"), said("Good.", weight=1)]
    learned, texts, warnings = read(tmp_path, [{"messages": chat}], template)
    assert learned == ["Good.<|im_end|>"]
    assert "Bad.<|im_end|>" in texts[0]
    assert warnings == ()


def test_a_turn_that_is_not_to_be_learned_is_left_out_of_everything(tmp_path):
    chat = [user("Hot?"), said("Bad.", train=False), user("Cold?"), said("Good.")]
    learned, _, _ = read(tmp_path, [{"messages": chat}], options=EVERYTHING)
    start = "<|im_start|>user\nHot?<|im_end|>\n<|im_start|>assistant\n"
    # The first token of a document is never predicted.
    assert "<|im_start|>" + learned[0] == start + (
        "\n<|im_start|>user\nCold?<|im_end|>\n<|im_start|>assistant\nGood.<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (said("x", weight=0.5), r"`weight` of message 1 of `messages` needs to be 0 or 1"),
        (said("x", train_detail=[{"begin_offset": 0}]), r"has `train_detail`"),
        (said([{"type": "image", "url": "x"}]), r"content of message 1.* images and the like"),
        (said({"a": 1}), r"content of message 1.*is an object"),
        ({"from": "function_call", "value": "{"}, r"the `function_call` of message 1.*no JSON"),
    ],
)
def test_a_message_that_cannot_be_used_is_named(tmp_path, message, problem):
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{problem}"):
        read(tmp_path, [{"messages": [message]}])


def test_a_null_is_no_text_and_parts_are_one_text(tmp_path):
    parts = [{"type": "text", "text": "win"}, {"type": "text", "text": "dy"}]
    rows = [{"messages": [user("Hot?"), said(content)]} for content in (None, parts)]
    learned, texts, _ = read(tmp_path, rows)
    assert sorted(learned) == ["<|im_end|>", "windy<|im_end|>"]
    assert not any("None" in text or "type" in text for text in texts)


def test_calls_that_a_template_drops_are_told_and_their_turn_is_not_learned(tmp_path):
    plain = {"messages": [user("Hot?"), said("No.")]}
    chat = [user("Hot?"), called("weather", city="Paris"), {"role": "tool", "content": "yes"}]
    rows = [plain, {"messages": [*chat, said("It is.")]}]
    learned, _, (warning,) = read(tmp_path, rows)
    assert sorted(learned) == ["It is.<|im_end|>", "No.<|im_end|>"]
    assert warning.startswith("of 2 sampled documents: 1 in which the chat template leaves out the")
    assert "tool calls of turns of the assistant, which are not learned" in warning
    assert "rows.jsonl:2" in warning
    learned, _, warnings = read(tmp_path, rows, WITH_CALLS)
    assert any('"Paris"' in one for one in learned)
    assert warnings == ()


@pytest.mark.parametrize("drops", ["content", "thoughts"])
@pytest.mark.parametrize("options", [None, EVERYTHING], ids=["completions", "all"])
def test_what_a_template_drops_is_told_whatever_it_is(tmp_path, drops, options):
    chat = [user("Hot?"), said("It is\n  cold.", reasoning_content="Look out.")]
    shown = "content[:3]" if drops == "content" else "content"
    template = CHATML.replace("message['content']", f"message.{shown} + (message.r or '')")
    more = {} if options is None else {"options": options}
    plain = {"messages": [user("Hot?"), said("No.", reasoning_content="")]}
    _, _, (warning,) = read(tmp_path, [{"messages": chat}, plain], template, **more)
    assert f"1 in which the chat template leaves out the {drops} of" in warning
    _, _, warnings = read(
        tmp_path, [{"messages": chat}], template.replace("message.r ", "message.reasoning_content ")
        .replace("[:3]", ""), **more
    )  # fmt: skip
    assert warnings == ()


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WITH_CALLS, '{"name": "weather", "arguments": {"city": "Paris"}}<|im_end|>'),
        (WANTS_NULL_AND_JSON, 'weather({"city": "Paris"})<|im_end|>'),
    ],
    ids=["objects", "null-and-json"],
)
def test_calls_are_given_as_the_template_expects_them(
    tmp_path, as_json, content, template, expected
):
    call = called("weather", content, city="Paris")
    if as_json:
        call["tool_calls"][0]["function"]["arguments"] = '{"city": "Paris"}'
    if content == "" and template is WANTS_NULL_AND_JSON:
        call["content"] = None
    learned, _, warnings = read(tmp_path, [{"messages": [user("Hot?"), call]}], template)
    assert learned == [expected]
    assert warnings == ()


@pytest.mark.parametrize("content", ["windy", [{"type": "text", "text": "windy"}]])
def test_a_template_that_wants_parts_has_them(tmp_path, content):
    learned, texts, _ = read(tmp_path, [{"messages": [user("Hot?"), said(content)]}], WANTS_PARTS)
    assert learned == ["windy<|im_end|>"]
    assert "Hot?" in texts[0]


def test_a_template_that_thinks_in_its_last_turn_trains_each_turn_as_it_is_generated(tmp_path):
    rows = [{"messages": [user("Hot?"), said("No."), user("Cold?"), said("Yes.")]}]
    learned, texts, (warning,) = read(tmp_path, rows, THINKING)
    thought = "<think>\n\n</think>\n\n"
    assert sorted(learned) == [f"{thought}No.<|im_end|>", f"{thought}Yes.<|im_end|>"]
    assert sum("assistant\nNo.<|im_end|>\n<|im_start|>user\nCold?" in text for text in texts) == 1
    assert "1 conversations trained turn by turn, each as it is generated" in warning


def test_a_prompt_that_opens_a_thought_leaves_the_answer_whole(tmp_path):
    rows = [{"messages": [user("Hot?"), said("<b>No."), user("Cold?"), said("hm</think>Yes.")]}]
    learned, _, (warning,) = read(tmp_path, rows, OPENS_A_THOUGHT)
    assert learned == ["<b>No.<|im_end|>Yes.<|im_end|>"]
    assert "1 in which the chat template leaves out the thoughts of turns" in warning


def test_of_a_long_conversation_the_beginning_is_learned_and_the_rest_is_counted(tmp_path):
    question = "Is it very cold and windy outside in the evening of a long day? " * 8
    rows = [
        {"messages": [user(question), said("Windy.")]},
        {"messages": [user("Hot?"), said(question)]},
        *[{"messages": [user("Hot?"), said("No.")]}] * 3,
        {"messages": [user("Cold?")]},
    ]
    learned, texts, (line,) = read(tmp_path, rows, longest=64)
    assert sorted(learned)[1:] == ["No.<|im_end|>"] * 3
    assert question.startswith(sorted(learned)[0])
    assert all("Hot?" in text for text in texts), "no answer without what it answers"
    assert line == (
        "of 6 sampled documents: 1 cut to their first 64 tokens (--seq-len); "
        "1 left out, as the first 64 tokens, to which longer ones are cut, have nothing to learn; "
        "1 left out, as they have nothing to learn"
    )
    with pytest.raises(DataError, match=r"nothing to learn\): .*larger --seq-len"):
        read(tmp_path, rows[:1], longest=64)
    refusing = DataOptions(long_documents="refuse", workers=0)
    with pytest.raises(DataError, match=r"rows.jsonl:\d: \d+ tokens, and the longest document"):
        read(tmp_path, rows, longest=64, options=refusing)


def test_long_text_is_cut_into_pieces_which_are_counted(tmp_path):
    learned, _, (line,) = read(tmp_path, [{"text": "a b c d e f g h " * 20}], None, longest=64)
    assert len(learned) > 1
    assert line == "of 1 sampled documents: 1 cut into pieces of 64 tokens (--seq-len)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A tale.", "<s>A tale.<|endoftext|>"),
        ("<s>A tale.", "<s>A tale.<|endoftext|>"),
        ("A tale.<|endoftext|>", "<s>A tale.<|endoftext|>"),
        ("<s>A tale.<|endoftext|>\n", "<s>A tale.<|endoftext|>\n"),
        ("A <s> tale <|endoftext|> goes.", "<s>A <s> tale <|endoftext|> goes.<|endoftext|>"),
    ],
)
def test_a_text_that_is_rendered_already_has_its_ends_once(tmp_path, text, expected):
    _, texts, _ = read(tmp_path, [{"text": text}], None, add_bos=True)
    assert texts == [expected]
    (tmp_path / "a.txt").write_text(text)
    _, texts, _ = read_file(tmp_path, tmp_path / "a.txt", None, add_bos=True)
    assert texts == [expected]
    row = {"prompt": text[:4], "completion": text[4:]}
    _, texts, _ = read(tmp_path, [row], None, add_bos=True)
    assert texts == [expected]


def test_a_pad_token_may_end_a_turn(tmp_path):
    folder = tokenizer_folder(tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"pad_token": "<|im_end|>"})
    )
    (tmp_path / "rows.jsonl").write_text(lines_of([{"messages": CHAT}]))
    data = data_of(tmp_path / "rows.jsonl", folder, longest=512)
    chunk = next(data.chunks(chunk_tokens=512, most_documents=9, seed=0))
    assert learned_text(loaded(folder), chunk) == ["A letter, é.<|im_end|>True.<|im_end|>"]
    assert data.warnings == ()


SHARED = [
    {"from": "human", "value": "Hot?"},
    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
    {"from": "observation", "value": "yes"},
    {"from": "gpt", "value": "It is."},
]


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_rows_of_sharegpt_are_conversations(tmp_path, name):
    rows = [{name: SHARED, "system": "Be brief.", "tools": '[{"name": "weather"}]'}]
    (learned,), (text,), _ = read(tmp_path, rows, WITH_CALLS)
    assert (
        learned == '{"name": "weather", "arguments": {"city": "Paris"}}<|im_end|>It is.<|im_end|>'
    )
    roles = [part.split("\n")[0] for part in text.split("<|im_start|>")[1:]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_rows_of_alpaca_are_conversations(tmp_path):
    row = {"instruction": "Say", "input": "it", "output": "It.", "text": "Say it: It."}
    more = {"system": "Be brief.", "history": [["Hot?", "No."]]}
    rows = [row, {**row, "input": "", **more}]
    learned, texts, _ = read(tmp_path, rows, name="rows.json")
    assert sorted(learned) == ["It.<|im_end|>", "No.<|im_end|>It.<|im_end|>"]
    assert sorted(texts) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHot?<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n<|im_start|>user\nSay<|im_end|>\n"
        "<|im_start|>assistant\nIt.<|im_end|>\n",
        "<|im_start|>user\nSay\nit<|im_end|>\n<|im_start|>assistant\nIt.<|im_end|>\n",
    ]


def test_rows_of_alpaca_have_its_own_prompt_without_a_chat_template(tmp_path):
    rows = [{"instruction": "Say", "input": given, "output": " It."} for given in ("it", "", None)]
    learned, texts, _ = read(tmp_path, rows, None)
    assert learned == [" It.<|endoftext|>"] * 3
    # stanford_alpaca/train.py, PROMPT_DICT
    with_input = (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay\n\n### Input:\nit\n\n### Response: It.<|endoftext|>"
    )
    without = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nSay\n\n### Response: It.<|endoftext|>"
    )
    assert sorted(texts) == sorted([with_input, without, without])
    with pytest.raises(DataError, match="has no chat template"):
        read(tmp_path, [{**rows[0], "history": [["a", "b"]]}], None)
    with pytest.raises(DataError, match="`history` needs to be a list of pairs"):
        read(tmp_path, [{**rows[0], "history": ["a"]}])


def test_a_row_behind_one_of_several_documents_is_named_with_its_own_line(tmp_path):
    chat = [user("Hot?"), said("No."), user("Cold?"), said("Yes.")]
    rows = [{"messages": chat}, {"messages": [user("Hot?"), said("No. " * 300)]}]
    refusing = DataOptions(long_documents="refuse", workers=0)
    with pytest.raises(DataError, match=r"rows.jsonl:2: \d+ tokens"):
        read(tmp_path, rows, THINKING, longest=256, options=refusing)
