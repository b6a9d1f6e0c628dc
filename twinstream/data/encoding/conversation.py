"""Conversations of rows, in the forms that OpenAI, ShareGPT and Alpaca gave them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinstream.data.data_error import DataError
from twinstream.data.shapes import GOES_ON

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
# OpenAI, Axolotl (either name), ms-swift, LLaMA-Factory
_FLAGS = ("weight", "train", "training", "loss", "loss_weight")
_PARTLY = ("train_detail", "training_detail")
_OPEN = "prefix"
CONTENT, CALLS, THOUGHTS = "the content", "the tool calls", "the thoughts"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Messages, those of the assistant to be learned, and descriptions of tools.

    Attributes:
        learned: indices of messages.
        unlearned: indices of the assistant's other messages, which the row leaves out.
        is_open: the last turn, the assistant's, is not at its end (`prefix` of that message, as
            Mistral's API has it, or `continue_final_message` of the row, as transformers has it).
    """

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    unlearned: tuple[int, ...]
    tools: object
    is_open: bool = False


def conversation_of(fields: Mapping[str, Any], name: str) -> Conversation:
    """Return the conversation in a field that is a list of messages.

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
        bool(value[-1].get(_OPEN) or fields.get(GOES_ON)) and messages[-1]["role"] == "assistant",
    )


def as_alpaca(fields: Mapping[str, Any], asked: str, answer: str | None = None) -> dict[str, Any]:
    """An instruction under another name, with what stands beside it, as Alpaca names them."""
    names = {"instruction": asked} | ({} if answer is None else {"output": answer})
    found: dict[str, Any] = {ours: text_of(fields, theirs) for ours, theirs in names.items()}
    given = [name for name in ("input", "context") if name not in names.values()]
    context = next((name for name in given if fields.get(name)), None)
    if context is not None:
        found["input"] = text_of(fields, context)
    return found | {name: fields.get(name) for name in ("history", "system", "tools")}


def alpaca_messages(asked: Mapping[str, Any]) -> list[Message]:
    """Return an Alpaca row's messages: pairs of `history`, instruction, output if any."""
    history = asked.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise DataError(
            "`history` needs to be a list of pairs, what was asked and what was answered, and is "
            f"{short(history)}"
        )
    last = [_instruction(asked), *([asked["output"]] if "output" in asked else [])]
    return [
        {"role": role, "content": content}
        for turn in [*history, last]
        for role, content in zip(("user", "assistant"), turn, strict=False)
    ]


def alpaca_conversation(asked: Mapping[str, Any]) -> Conversation:
    """Return the conversation of an instruction and its output, after the pairs of `history`."""
    return conversation_of({**asked, "messages": alpaca_messages(asked)}, "messages")


def alpaca_prompt(asked: Mapping[str, Any]) -> str:
    """Stanford Alpaca's own, for tokenizers without a chat template (train.py, PROMPT_DICT)."""
    given = asked.get("input")
    context = ", paired with an input that provides further context" if given else ""
    return (
        f"Below is an instruction that describes a task{context}. Write a response that "
        "appropriately completes the request.\n\n"
        f"### Instruction:\n{asked['instruction']}\n\n"
        + (f"### Input:\n{given}\n\n" if given else "")
        + "### Response:"
    )


def _instruction(asked: Mapping[str, Any]) -> str:
    instruction = str(asked["instruction"])
    return f"{instruction}\n{asked['input']}" if asked.get("input") else instruction


def role_of(message: object) -> object:
    """Return the role of a message in OpenAI's words; None if it has none."""
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return _ROLES.get(role, role) if isinstance(role, str) else role


def is_alike(message: object, other: object) -> bool:
    """Return whether two messages have the same role and content, by whatever names of fields."""
    if not isinstance(message, dict) or not isinstance(other, dict):
        return False
    return _said(message) == _said(other)


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    named = {_NAMES.get(str(key), str(key)): one for key, one in message.items()}
    found = {key: one for key, one in named.items() if one is not None and key not in _FLAGS}
    return found | {"role": role_of(message), "content": _as_text(named.get("content"))}


def undescribed(fields: Mapping[str, Any], text: str) -> bool:
    """Return whether a rendered text lacks the name of a tool that the row describes."""
    tools = _tools(fields)
    found = tools if isinstance(tools, list) else [tools]
    functions = [one.get("function", one) if isinstance(one, dict) else {} for one in found]
    names = [one.get("name") if isinstance(one, dict) else None for one in functions]
    return not all(name in text for name in names if isinstance(name, str))


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
        if key not in (*_FLAGS, _OPEN) and (one is not None or key == "content")
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
    """Return the value of a field that has to be text."""
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
    """Return the repr of a value, cut after 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
