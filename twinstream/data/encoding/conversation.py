"""Conversations of rows, in the forms that OpenAI, ShareGPT and Alpaca gave them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinstream.data.data_error import DataError

Message = Mapping[str, Any]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_call": "assistant",
}
_NAMES = {"from": "role", "value": "content"}
_FLAGS = ("weight", "train", "training", "loss")  # OpenAI, Axolotl (either name), ms-swift
_PARTLY = ("train_detail", "training_detail")
CONTENT, CALLS, THOUGHTS = "the content", "the tool calls", "the thoughts"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Messages, those of the assistant to be learned, and descriptions of tools.

    Attributes:
        learned: indices of messages.
        unlearned: indices of the assistant's other messages, which the row leaves out.
    """

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    unlearned: tuple[int, ...]
    tools: object


def conversation_of(fields: Mapping[str, Any], name: str) -> Conversation:
    """Of a field that is a list of messages.

    Raises:
        DataError: it is none, or a message cannot be used.
    """
    value = fields[name]
    if not isinstance(value, list) or not value:
        raise DataError(
            f"`{name}` needs to be a list of messages, and is {kind(value)}: {short(value)}"
        )
    named = [(f"message {index + 1} of `{name}`", one) for index, one in enumerate(value)]
    messages = [_message(one, place) for place, one in named]
    chosen = [_is_learned(one, place) for place, one in named]
    system = fields.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
        chosen = [True, *chosen]
    speaks = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
    return Conversation(
        tuple(messages),
        tuple(index for index in speaks if chosen[index]),
        tuple(index for index in speaks if not chosen[index]),
        _tools(fields),
    )


def alpaca_conversation(fields: Mapping[str, Any]) -> Conversation:
    """Of an instruction with its output, and the pairs of `history` before it."""
    turns = [*(fields.get("history") or []), [_instruction(fields), text_of(fields, "output")]]
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise DataError(
            "`history` needs to be a list of pairs, what was asked and what was answered, and is "
            f"{short(fields['history'])}"
        )
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    return conversation_of({**fields, "messages": messages}, "messages")


def alpaca_prompt(fields: Mapping[str, Any]) -> str:
    """Stanford Alpaca's own, for tokenizers without a chat template (train.py, PROMPT_DICT)."""
    given = fields.get("input")
    context = ", paired with an input that provides further context" if given else ""
    return (
        f"Below is an instruction that describes a task{context}. Write a response that "
        "appropriately completes the request.\n\n"
        f"### Instruction:\n{text_of(fields, 'instruction')}\n\n"
        + (f"### Input:\n{text_of(fields, 'input')}\n\n" if given else "")
        + "### Response:"
    )


def pair_of(fields: Mapping[str, Any]) -> tuple[Any, tuple[Any, Any]]:
    """The prompt of a row with `chosen` and `rejected`, and what follows it in each.

    All are texts, or all are lists of messages. A text before messages is the user's, and texts
    behind messages are the assistant's. Without a `prompt` it is what both answers begin with:
    messages that are the same or, of texts, up to a space or a line end.

    Raises:
        DataError: an answer is no text and no messages, is empty, or is the other one; or there is
            no prompt.
    """
    prompt: Any = fields.get("prompt")
    prompt, chosen, rejected = (
        [x] if isinstance(x, dict) else x for x in (prompt, fields["chosen"], fields["rejected"])
    )
    if not isinstance(chosen, str | list) or type(chosen) is not type(rejected):
        raise DataError(
            f"`chosen` is {kind(chosen)} and `rejected` {kind(rejected)}: both need to be text, or "
            "lists of messages"
        )
    if not isinstance(prompt, str | list | None):
        raise DataError(
            f"`prompt` needs to be text or a list of messages, and is {kind(prompt)}: "
            f"{short(prompt)}"
        )
    if empty := [name for name in ("chosen", "rejected") if not fields[name]]:
        raise DataError(f"`{empty[0]}` is empty: a pair needs two answers")
    if chosen == rejected:
        raise DataError("`chosen` and `rejected` are the same: there is nothing to prefer")
    if isinstance(prompt, list) and isinstance(chosen, str):
        first, second = ([{"role": "assistant", "content": x}] for x in (chosen, rejected))
        return prompt, (first, second)
    if prompt is not None and type(prompt) is type(chosen):
        return prompt, (chosen, rejected)
    alike = zip(chosen, rejected, strict=False)
    same = next((i for i, (a, b) in enumerate(alike) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        same = 1 + max(chosen.rfind(end, 0, same) for end in " \n")
    if not same and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}], (chosen, rejected)
    if not 0 < same < min(len(chosen), len(rejected)):
        raise DataError(
            "the row has no `prompt`, and what `chosen` and `rejected` begin with is "
            + ("nothing" if not same else "all of one of them")
        )
    return chosen[:same], (chosen[same:], rejected[same:])


def _instruction(fields: Mapping[str, Any]) -> str:
    instruction = text_of(fields, "instruction")
    return f"{instruction}\n{text_of(fields, 'input')}" if fields.get("input") else instruction


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The same messages in all forms that templates expect, the most common first.

    A content is text (none where it was null), null where it was null, or a list of parts; the
    arguments of a tool call are an object or its JSON.
    """
    given: list[list[Message]] = []
    for arguments in (_as_object, _as_json):
        for content in (_as_text, _as_text_or_null, _as_parts):
            form = [_in_form(message, content, arguments) for message in messages]
            if form not in given:
                given.append(form)
                yield form


def left_out(message: Message, text: str) -> str | None:
    """Return what of a message is missing in a text, apart from white space; None if nothing is.

    It is `CONTENT`, `CALLS` or `THOUGHTS`, the first of which is missing.
    """
    squeezed = "".join(text.split())
    for name, part_text in _parts_of(message):
        if not any("".join(spelling.split()) in squeezed for spelling in _spellings(part_text)):
            return name
    return None


def _spellings(part_text: str) -> Iterator[str]:
    """As it is, and as a template that prints JSON has it."""
    yield part_text
    yield json.dumps(part_text)[1:-1]
    yield json.dumps(part_text, ensure_ascii=False)[1:-1]


def _parts_of(message: Message) -> Iterator[tuple[str, str]]:
    """All that a message says, each with its name."""
    thought, _, answer = _as_text(message.get("content")).rpartition("</think>")
    yield CONTENT, answer
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        for part_text in _leaves([function.get("name"), _as_object(function.get("arguments"))]):
            yield CALLS, part_text
    yield THOUGHTS, thought.replace("<think>", "")
    yield from ((THOUGHTS, message[key]) for key in _THOUGHTS if isinstance(message.get(key), str))


def _leaves(value: object) -> Iterator[str]:
    """Texts and numbers within a value of JSON."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _message(value: object, place: str) -> Message:
    """With `role` and `content`, and without flags and nulls."""
    role = value.get("role", value.get("from")) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(role, str):
        raise DataError(
            f"{place} needs `role` and `content` (or `from` and `value`), and is {kind(value)}: "
            f"{short(value)}"
        )
    named = {_NAMES.get(str(key), str(key)): one for key, one in value.items()}
    found = {
        key: one
        for key, one in named.items()
        if key not in _FLAGS and (one is not None or key == "content")
    }
    found["role"] = _ROLES.get(role, role)
    if role == "function_call":
        calls = _json(found.pop("content", None), f"the `function_call` of {place}")
        found |= {"content": None, "tool_calls": _calls(calls)}
    if "content" not in found and not any(found.get(k) for k in ("tool_calls", *_THOUGHTS)):
        raise DataError(f"{place} has no `content`: {short(value)}")
    content = found.setdefault("content", None)
    parts = content if isinstance(content, list) else [content or ""]
    if not all(isinstance(_part_text(part), str) for part in parts):
        raise DataError(
            f"the content of {place} needs to be text, or parts with `text`, and is {kind(content)}"
            f": {short(content)}; images and the like are not read"
        )
    return found


def _calls(calls: object) -> list[object]:
    return [
        {"type": "function", "function": one}
        for one in (calls if isinstance(calls, list) else [calls])
    ]


def _part_text(part: object) -> object:
    return part.get("text") if isinstance(part, dict) else part


def _is_learned(message: Mapping[str, Any], place: str) -> bool:
    """Whether no flag of the message says that it is not."""
    for name in _PARTLY:
        if message.get(name):
            raise DataError(
                f"{place} has `{name}`, ranges of characters, which is not read: divide it into "
                "messages, or give `train`"
            )
    flags = {name: message[name] for name in _FLAGS if message.get(name) is not None}
    for name, flag in flags.items():
        if flag not in (0, 1):
            raise DataError(f"`{name}` of {place} needs to be 0 or 1, and is {short(flag)}")
    return all(flags.values())


def _in_form(
    message: Message, content: Callable[[Any], Any], arguments: Callable[[Any], Any]
) -> Message:
    found = {**message, "content": content(message["content"])}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_with_arguments(call, arguments) for call in calls]
    return found


def _with_arguments(call: Any, form: Callable[[Any], Any]) -> Any:
    if isinstance(call, dict) and "arguments" in call:
        return {**call, "arguments": form(call["arguments"])}
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], form)}
    return call


def _as_text(content: Any) -> str:
    parts = content if isinstance(content, list) else [content or ""]
    return "".join(str(_part_text(part)) for part in parts)


def _as_text_or_null(content: Any) -> str | None:
    return None if content is None else _as_text(content)


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """A field that needs to be text."""
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(f"`{name}` needs to be text, and is {kind(value)}: {short(value)}")
    return value


def _tools(fields: Mapping[str, Any]) -> object:
    """Descriptions of functions, as a list or as its JSON; None without."""
    return _json(fields.get("tools") or None, "`tools`") or None


def _json(value: Any, name: str) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{name} is no JSON: {error}") from None


def kind(value: object) -> str:
    """Return the kind of a value of JSON, in words."""
    names = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def short(value: object) -> str:
    """A value, or its beginning."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
