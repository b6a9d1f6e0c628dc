"""Rows as text and learned tokens: templates as transformers renders them, spans, stop tokens."""

import json
from datetime import date
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.samples import (
    CHAT,
    CHATML,
    FORGETFUL,
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
from twinstream.data.encoding.template import ChatTemplate, find_template
from twinstream.data.options import DataOptions

DAY = date(2025, 3, 1)
TOOLS = [{"type": "function", "function": {"name": "f<>", "description": "é"}}]
WITH_TOOLS = """{%- if tools %}{{- tools | tojson(indent=2) }}
{% endif %}
{%- for message in messages %}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
  {{ bos_token }}{{ message | tojson }}
{% endfor %}"""


def epoch_of(tmp_path, rows, template=CHATML, *, add_bos=False, tokenizer=True, **more):
    """All chunks, with the tokenizer."""
    path = tmp_path / "rows.jsonl"
    path.write_text(lines_of(rows))
    folder = tokenizer_folder(tmp_path / "tokenizer", template, add_bos=add_bos)
    data = data_of(path, folder if tokenizer else None, longest=1024, **more)
    stream = data.chunks(chunk_tokens=1024, most_documents=100, seed=0)
    return an_epoch(stream), loaded(folder), data


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL, WITH_TOOLS])
@pytest.mark.parametrize("prompts", [False, True])
def test_a_template_is_rendered_as_transformers_does(template, prompts):
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs, spans = render_jinja_template(
        [CHAT],
        tools=TOOLS,
        chat_template=template,
        add_generation_prompt=prompts,
        return_assistant_tokens_mask=True,
        **named,
    )
    ours = ChatTemplate(template, named, DAY).render(CHAT, TOOLS, prompts=prompts)
    assert ours.text == theirs[0]
    assert list(ours.generated) == spans[0]


def test_a_template_knows_one_day_and_may_refuse():
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(source, {}, DAY).render(CHAT).text == "01 Mar 2025"
    with pytest.raises(DataError, match="chat template fails: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, DAY).render(CHAT)


def test_a_template_reaches_nothing_outside(tmp_path):
    source = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(DataError, match=r"chat template fails: .*unsafe"):
        ChatTemplate(source, {}, DAY).render(CHAT)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
         r"runs for more than 0.1 s of CPU time on one conversation; take another"),
        ("{{ '%900000000d' % 1 }}", r"takes more than 0.25 GiB of memory"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", r"nests too deeply"),
        ("{% if 1 %}" * 1500 + "{% endif %}" * 1500, r"nests too deeply"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"nests too deeply"),
        ("{{ 'ab ' * (9 * 10**6) }}", r"writes 27,000,002 characters .* allowed: take another"),
        ("{{ strftime_now('%Y' * 10**6) }}", r"writes 4,000,002 characters"),
        ("{% generation %}\ufdd0{% endgeneration %}", r"has .*U\+FDD0.*take them out"),
    ],
    ids=["time", "memory", "parentheses", "blocks", "recursion", "text", "date", "marks"],
)  # fmt: skip
def test_a_template_that_takes_too_much_is_stopped_and_told(source, message):
    source = (
        "{% if messages[0].content == 'go' %}" + source + "{% endif %}{{ messages[0].content }}"
    )
    template = ChatTemplate(source, {}, DAY, cpu_seconds=0.1, memory_bytes=1 << 28)
    with pytest.raises(DataError, match=f"the chat template {message}"):
        template.render([{"role": "user", "content": "go"}])
    if "nests" not in message:
        assert template.render([{"role": "user", "content": "on"}]).text == "on"


def test_the_process_of_a_template_is_given_more_for_more_and_ends_with_it():
    template = ChatTemplate("{{ messages[0].content * 3 }}", {}, DAY, memory_bytes=1 << 27)
    content = "word " * (4 << 20)
    assert len(template.render([{"role": "user", "content": content}]).text) == 3 * len(content)
    process = template._renderer._process
    assert process.poll() is None
    del template
    assert process.poll() is not None


def test_a_template_is_sent_a_conversation_once(monkeypatch):
    template = ChatTemplate(CHATML, {}, DAY)
    whole = template.render(CHAT).text
    sent = []
    connection = template._renderer._connection
    monkeypatch.setattr(
        template._renderer, "_connection",
        SimpleNamespace(
            send_bytes=lambda b: sent.append(len(b)) or connection.send_bytes(b),
            recv_bytes=connection.recv_bytes,
        ),
    )  # fmt: skip
    assert whole.startswith(template.render(CHAT, count=2).text)
    assert max(sent) < 50
    assert template.render(list(CHAT[:1])).text == template.render(CHAT, count=1).text


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by-prefixes", "by-marks"])
def test_what_the_assistant_says_is_learned_with_its_stop_token_and_nothing_else(
    tmp_path, template
):
    (chunk,), tokenizer, data = epoch_of(tmp_path, [{"messages": CHAT}], template)
    assert learned_text(tokenizer, chunk) == ["A letter, é.<|im_end|>True.<|im_end|>"]
    assert data.warnings == ()
    ((ids, _),) = documents(chunk)
    expected = ChatTemplate(template, {"bos_token": "<s>"}, DAY).render(CHAT).text
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("stored", ["files", "a list", "an object"])
def test_a_conversation_with_tools_is_rendered_by_the_template_for_them(tmp_path, stored):
    """As `apply_chat_template` does, of a folder as transformers 5 writes it and of older ones."""
    folder = tokenizer_folder(tmp_path / "tokenizer", None)
    named = {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML}
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", bos_token="<s>"
    )
    theirs.chat_template = named
    if stored == "files":
        theirs.save_pretrained(folder)
        assert (folder / "additional_chat_templates" / "tool_use.jinja").exists()
    else:
        listed = [{"name": name, "template": source} for name, source in named.items()]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = listed if stored == "a list" else named
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [{"messages": CHAT, "tools": TOOLS}, {"messages": CHAT}]
    (tmp_path / "rows.jsonl").write_text(lines_of(rows))
    data = data_of(tmp_path / "rows.jsonl", folder, longest=1024)
    (chunk,) = an_epoch(data.chunks(chunk_tokens=1024, most_documents=100, seed=0))
    found = {loaded(folder).decode(ids, skip_special_tokens=False) for ids, _ in documents(chunk)}
    expected = {
        theirs.apply_chat_template(CHAT, tools=tools, tokenize=False) for tools in (TOOLS, None)
    }
    assert found == expected and len(found) == 2


def test_a_processors_template_is_taken_and_one_without_a_default_refused(tmp_path):
    folder = tokenizer_folder(tmp_path / "tokenizer", None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    found = find_template(folder, None)
    assert found is not None and found.default == CHATML
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text(CHATML)
    with pytest.raises(DataError, match="templates named rag but none named default"):
        find_template(folder, None)


def test_everything_is_learned_if_asked(tmp_path):
    everything = DataOptions(loss_on="all", workers=0)
    rows = [{"messages": CHAT}, {"prompt": "1 + 1 =", "completion": " 2"}]
    chunks, _, _ = epoch_of(tmp_path, rows, FORGETFUL, options=everything)
    found = [document for chunk in chunks for document in documents(chunk)]
    assert len(found) == 2
    assert all(labels == [*ids[1:], -100] for ids, labels in found)


def test_turns_that_a_template_forgets_are_each_trained_as_they_are_generated(tmp_path):
    thought = [*CHAT[:2], {"role": "assistant", "content": "hm</think>A letter."}, *CHAT[3:]]
    chunks, tokenizer, data = epoch_of(tmp_path, [{"messages": thought}], FORGETFUL)
    found = sorted(learned_text(tokenizer, chunks[0]))
    assert found == ["True.<|im_end|>", "hm</think>A letter.<|im_end|>"]
    shown = {tokenizer.decode(ids, skip_special_tokens=False) for ids, _ in documents(chunks[0])}
    template = ChatTemplate(FORGETFUL, {}, DAY)
    assert shown == {template.render(thought[:3]).text, template.render(thought).text}
    (note,) = data.warnings
    assert "1 conversations trained turn by turn, each as it is generated" in note


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_completion_is_learned_with_the_end_token(tmp_path, add_bos):
    rows = [{"prompt": "Name: ", "completion": "Ada"}, {"prompt": "1 + 1 =", "completion": " 2 "}]
    (chunk,), tokenizer, data = epoch_of(tmp_path, rows, add_bos=add_bos)
    learned = sorted(learned_text(tokenizer, chunk))
    assert learned == [" 2 <|endoftext|>", "Ada<|endoftext|>"]
    assert data.warnings == ()
    begins = {tokenizer.decode(ids[:1], skip_special_tokens=False) for ids, _ in documents(chunk)}
    assert ("<s>" in begins) == add_bos


def test_a_completion_in_messages_is_all_learned(tmp_path):
    (chunk,), tokenizer, _ = epoch_of(tmp_path, [{"prompt": CHAT[:2], "completion": CHAT[2:]}])
    (learned,) = learned_text(tokenizer, chunk)
    assert learned.startswith("A letter, é.<|im_end|>\n<|im_start|>user\nAnd")
    assert learned.endswith("True.<|im_end|>")


def test_plain_text_is_learned_with_the_end_token_and_begins_as_the_tokenizer_says(tmp_path):
    (chunk,), tokenizer, _ = epoch_of(tmp_path, [{"text": "A tale."}], None, add_bos=True)
    ((ids, labels),) = documents(chunk)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>A tale.<|endoftext|>"
    assert labels == [*ids[1:], -100]


def test_what_a_tokenizer_cuts_or_pads_for_others_is_whole(tmp_path):
    folder = tokenizer_folder(tmp_path / "tokenizer")
    tokenizer = loaded(folder)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=600)
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text(lines_of([{"messages": CHAT}]))
    stream = data_of(tmp_path / "rows.jsonl", folder, longest=512).chunks(
        chunk_tokens=512, most_documents=9, seed=0
    )
    chunk = next(stream)
    (learned,) = learned_text(loaded(folder), chunk)
    assert learned == "A letter, é.<|im_end|>True.<|im_end|>"
    assert chunk.lengths[0] < 200


def test_a_conversation_that_never_stops_is_warned_of(tmp_path):
    endless = CHATML.replace("<|im_end|>", "")
    _, _, data = epoch_of(tmp_path, [{"messages": CHAT}], endless)
    assert len(data.warnings) == 1
    assert "in 1 of 1 sampled documents no end token is learned" in data.warnings[0]


def test_messages_beside_other_fields_win_and_empty_values_are_no_values(tmp_path):
    chat = [message | {"tool_calls": None} for message in CHAT]
    rows = [{"text": None, "prompt": "What is é?", "messages": chat}]
    template = CHATML.replace("'<|im_end|>'", "(message.tool_calls is defined) ~ '<|im_end|>'")
    (chunk,), tokenizer, _ = epoch_of(tmp_path, rows, template)
    (learned,) = learned_text(tokenizer, chunk)
    assert learned == "A letter, é.False<|im_end|>True.False<|im_end|>"


def test_half_a_character_becomes_a_replacement(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a\\ud83d b"}\n')
    stream = data_of(tmp_path / "rows.jsonl").chunks(chunk_tokens=64, most_documents=9, seed=0)
    ((ids, _),) = documents(next(stream))
    assert bytes(ids).decode() == "a\ufffd b"


@pytest.mark.parametrize("store", ["file", "named", "given"])
def test_templates_are_found_where_they_are(tmp_path, store):
    folder = tokenizer_folder(tmp_path / "tokenizer", None)
    given = None
    if store == "named":
        named = [{"name": "tool_use", "template": "?"}, {"name": "default", "template": CHATML}]
        tokenizer_folder(folder, named)
    else:
        path = folder / "chat_template.jinja" if store == "file" else tmp_path / "mine.jinja"
        path.write_text(CHATML)
        given = None if store == "file" else path
    (tmp_path / "rows.jsonl").write_text(lines_of([{"messages": CHAT}]))
    options = DataOptions(chat_template=given, workers=0)
    data = data_of(tmp_path / "rows.jsonl", folder, longest=512, options=options)
    stream = data.chunks(chunk_tokens=512, most_documents=9, seed=0)
    (learned,) = learned_text(loaded(folder), next(stream))
    assert learned == "A letter, é.<|im_end|>True.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"txt": "a", "id": 3}, r"none of the fields.*it has txt, id: rename"),
        ({"text": None}, r"it has text \(null\)"),
        ({"text": ["a"]}, r"`text` needs to be text, and is a list: \['a'\]"),
        ({"messages": []}, r"`messages` needs to be a list of messages"),
        ({"messages": [{"who": "x"}]}, r"message 1 of `messages` needs `role` and `content`"),
        ({"messages": [{"role": "user"}]}, r"message 1 of `messages` has no `content`"),
        ({"prompt": "a", "completion": [1]}, r"`completion` needs to be text, and is a list"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_line(tmp_path, row, message):
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{message}"):
        epoch_of(tmp_path, [{"text": "fine"}, row])


def test_messages_without_a_template_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*no chat template: take the tokenizer of"):
        epoch_of(tmp_path, [{"messages": CHAT}], None)


def test_a_template_that_is_none_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"chat template is no Jinja: line 1"):
        epoch_of(tmp_path, [{"messages": CHAT}], "{% if %}")


def test_a_conversation_without_an_answer_teaches_nothing_and_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none of 2 sampled documents has a token to learn"):
        epoch_of(tmp_path, [{"messages": CHAT[:2]}] * 2)


def test_tools_may_be_json_and_are_shown_to_the_template(tmp_path):
    template = "{{ tools[0].function.name }}" + CHATML
    rows = [{"messages": CHAT, "tools": tools} for tools in (TOOLS, json.dumps(TOOLS))]
    (chunk,), tokenizer, _ = epoch_of(tmp_path, rows, template)
    assert [tokenizer.decode(ids)[:3] for ids, _ in documents(chunk)] == ["f<>", "f<>"]
