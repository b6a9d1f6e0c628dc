"""A row as one text, with the parts of it that are learned."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinstream.data.data_error import DataError
from twinstream.data.encoding.template import ChatTemplate, Message, Span
from twinstream.data.reading.rows import Row

_FIELDS = "`text`, `messages`, or `prompt` with `completion`"
_EVERYTHING = 'train on everything (loss_on="all")'


@dataclass(frozen=True)
class Passage:
    """One document's text.

    Attributes:
        learned: ranges of characters; None is everything.
        is_chat: the template has put its special tokens in, so that none go around it.
    """

    text: str
    learned: tuple[Span, ...] | None = None
    is_chat: bool = False


@dataclass(frozen=True)
class PassageMaker:
    """Makes passages of rows, by what a row has: messages, a prompt and a completion, or text.

    Attributes:
        stops: the texts of the tokens at which generation stops.
    """

    template: ChatTemplate | None
    loss_on: Literal["completions", "all"]
    stops: tuple[str, ...]

    def passage(self, row: Row) -> Passage:
        """Raises DataError, which says where the row is and what it has, if there is none."""
        try:
            passage = self._passage(row.fields)
        except DataError as error:
            raise DataError(f"{row.where()}: {error}") from None
        return Passage(_encodable(passage.text), passage.learned, passage.is_chat)

    def _passage(self, fields: Mapping[str, Any]) -> Passage:
        if fields.get("messages") is not None:
            return self._conversation(_messages(fields, "messages"), _tools(fields))
        if fields.get("prompt") is not None and fields.get("completion") is not None:
            return self._answered(fields)
        if fields.get("text") is not None:
            return Passage(_text(fields, "text"))
        found = [name if fields[name] is not None else f"{name} (null)" for name in fields]
        raise DataError(
            f"the row has none of the fields {_FIELDS}; it has {', '.join(found) or 'none'}: "
            "rename the one with the text"
        )

    def _answered(self, fields: Mapping[str, Any]) -> Passage:
        if isinstance(fields["prompt"], str):
            prompt, completion = _text(fields, "prompt"), _text(fields, "completion")
            whole = prompt + completion
            return Passage(whole, self._chosen([(len(prompt), len(whole))]))
        return self._answered_in_messages(fields)

    def _answered_in_messages(self, fields: Mapping[str, Any]) -> Passage:
        prompt, completion = _messages(fields, "prompt"), _messages(fields, "completion")
        template, tools = self._needed_template(), _tools(fields)
        whole = template.render([*prompt, *completion], tools).text
        if self.loss_on == "all":
            return Passage(whole, None, is_chat=True)
        before = template.render(prompt, tools, prompts=True).text
        _require_prefix(before, whole, "the prompt alone")
        span = self._to_the_stop(whole, len(before), len(whole))
        return Passage(whole, (span,), is_chat=True)

    def _conversation(self, messages: list[Message], tools: object) -> Passage:
        template = self._needed_template()
        whole = template.render(messages, tools)
        if self.loss_on == "all":
            return Passage(whole.text, None, is_chat=True)
        spans = whole.generated if template.marks_generation else self._turns(messages, tools)
        return Passage(whole.text, tuple(spans), is_chat=True)

    def _turns(self, messages: list[Message], tools: object) -> Iterator[Span]:
        """Where the assistant speaks, found by rendering up to it and up to its end."""
        template = self._needed_template()
        whole = template.render(messages, tools).text
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = template.render(messages[:index], tools, prompts=True).text if index else ""
            after = template.render(messages[: index + 1], tools).text
            _require_prefix(before, after, f"what comes before message {index + 1}")
            _require_prefix(after, whole, f"everything up to message {index + 1}")
            yield self._to_the_stop(whole, len(before), len(after))

    def _to_the_stop(self, text: str, start: int, end: int) -> Span:
        """Without the white space after the token at which generation stops."""
        spoken = text[start:end].rstrip()
        return (start, start + len(spoken)) if spoken.endswith(self.stops) else (start, end)

    def _chosen(self, spans: Sequence[Span]) -> tuple[Span, ...] | None:
        return None if self.loss_on == "all" else tuple(spans)

    def _needed_template(self) -> ChatTemplate:
        if self.template is None:
            raise DataError(
                "the row has messages, and the tokenizer has no chat template: take the tokenizer "
                "of a chat model, give a template as a file, or make the rows plain text"
            )
        return self.template


def _require_prefix(start: str, whole: str, name: str) -> None:
    if whole.startswith(start):
        return
    pairs = zip(start, whole, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(start), len(whole)))
    raise DataError(
        "the chat template does not show which tokens are the assistant's: it renders "
        f"{name} differently when more follows (from character {same + 1}: "
        f"{start[same : same + 30]!r}, then {whole[same : same + 30]!r}); put "
        f"{{% generation %}} into the template, or {_EVERYTHING}"
    )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(f"`{name}` needs to be text, and is {_kind(value)}: {_short(value)}")
    return value


def _messages(fields: Mapping[str, Any], name: str) -> list[Message]:
    """Messages without what a table puts where others have a value."""
    value = fields[name]
    if not isinstance(value, list) or not value:
        raise DataError(
            f"`{name}` needs to be a list of messages, and is {_kind(value)}: {_short(value)}"
        )
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"message {index + 1} of `{name}` needs `role` and `content`, and is "
                f"{_kind(message)}: {_short(message)}"
            )
    return [{key: v for key, v in m.items() if v is not None or key == "content"} for m in value]


def _tools(fields: Mapping[str, Any]) -> object:
    """Descriptions of functions, as a list or as its JSON; None without."""
    tools = fields.get("tools")
    try:
        return (json.loads(tools) if isinstance(tools, str) else tools) or None
    except ValueError as error:
        raise DataError(f"`tools` is no JSON: {error}") from None


def _encodable(text: str) -> str:
    """JSON can name halves of characters, which are no text: they become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # One character for one, so that the learned ranges stay where they are.
        return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
