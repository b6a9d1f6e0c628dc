"""A row as one text or several, with the parts of them that are learned."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from twinstream.data.data_error import DataError
from twinstream.data.encoding.conversation import (
    THOUGHTS,
    Conversation,
    Message,
    alpaca_conversation,
    alpaca_prompt,
    conversation_of,
    forms,
    left_out,
    pair_of,
    text_of,
)
from twinstream.data.encoding.template import ChatTemplate, Span, TemplateLimitError
from twinstream.data.reading.parquet import ROWS
from twinstream.data.reading.rows import DataRow

_EVERYTHING = 'train on everything (loss_on="all")'


@dataclass(frozen=True)
class Passage:
    """One document's text.

    Attributes:
        learned: ranges of characters; None is everything.
        is_chat: the template has put its special tokens in, so that none go around it.
        left_out: what the assistant says and the template does not render, if anything.
    """

    text: str
    learned: tuple[Span, ...] | None = None
    is_chat: bool = False
    left_out: str | None = None


@dataclass(frozen=True)
class PassageMaker:
    """Makes passages of rows, by what a row has: messages, a prompt and a completion, or text.

    Attributes:
        stops: the texts of the tokens at which generation stops.
        pairs: of each row two passages, what is chosen and what is rejected.
    """

    template: ChatTemplate | None
    loss_on: Literal["completions", "all"]
    stops: tuple[str, ...]
    pairs: bool = False

    def passages(self, row: DataRow) -> list[Passage]:
        """One, or one for each of the assistant's turns that the template renders differently
        once more follows; of pairs two.

        Raises:
            DataError: says where the row is, and what is wrong with it.
        """
        fields = row.fields  # says itself where the row is
        try:
            return [replace(one, text=_encodable(one.text)) for one in self._passages(fields)]
        except DataError as error:
            raise DataError(f"{row.where()}: {error}") from None

    def _passages(self, fields: Mapping[str, Any]) -> list[Passage]:
        def has(*names: str) -> bool:
            return all(fields.get(name) is not None for name in names)

        if self.pairs:
            return self._of_pair(fields)
        if has("messages"):
            return self._of_conversation(conversation_of(fields, "messages"))
        if has("conversations"):
            return self._of_conversation(conversation_of(fields, "conversations"))
        if has("prompt", "completion"):
            if isinstance(fields["prompt"], str):
                return [self._answered(fields["prompt"], text_of(fields, "completion"))]
            return self._answered_in_messages(fields)
        if has("instruction", "output"):
            if self.template is not None or fields.get("history"):
                return self._of_conversation(alpaca_conversation(fields))
            return [self._answered(alpaca_prompt(fields), text_of(fields, "output"))]
        if has("text"):
            return [Passage(text_of(fields, "text"))]
        rename = "rename the one with the text"
        if has("chosen", "rejected"):
            rename = "pairs are trained on with `--loss dpo`"
        raise DataError(f"the row has none of the fields {ROWS}; it has {_names(fields)}: {rename}")

    def _of_pair(self, fields: Mapping[str, Any]) -> list[Passage]:
        """What is chosen, then what is rejected, each behind the prompt of both."""
        if fields.get("chosen") is None or fields.get("rejected") is None:
            raise DataError(
                "the loss is of pairs (--loss dpo), and the row lacks `chosen` or `rejected`; it "
                f"has {_names(fields)}"
            )
        prompt, answers = pair_of(fields)
        if isinstance(prompt, str):
            found = [self._answered(prompt, answer) for answer in answers]
        else:
            told = {**fields, "prompt": prompt}
            found = [
                one
                for answer in answers
                for one in self._answered_in_messages({**told, "completion": answer})
            ]
        assert len(found) == 2, "a pair is two documents"
        return found

    def _answered(self, prompt: str, completion: str) -> Passage:
        whole = prompt + completion
        everything = self.loss_on == "all"
        return Passage(whole, None if everything else ((len(prompt), len(whole)),))

    def _answered_in_messages(self, fields: Mapping[str, Any]) -> list[Passage]:
        prompt = conversation_of(fields, "prompt")
        answer = conversation_of({**fields, "system": None}, "completion")
        if prompt.unlearned or answer.unlearned:
            raise DataError(
                "the row has a prompt and a completion, and a message that is not to be learned: "
                "give `messages`"
            )
        behind = len(prompt.messages)
        messages = (*prompt.messages, *answer.messages)
        learned = tuple(behind + index for index in answer.learned)

        def rendered(form: list[Message]) -> list[Passage]:
            template, tools = self._needed_template(), prompt.tools
            whole = template.render(form, tools).text
            learned_messages = [form[index] for index in learned]
            if self.loss_on == "all":
                return [Passage(whole, None, True, _left_out(learned_messages, whole))]
            start = self._start(form, tools, behind, whole)
            span = self._to_the_stop(whole, start, len(whole))
            return [Passage(whole, (span,), True, _left_out(learned_messages, whole[start:]))]

        return _in_the_best_form(messages, rendered)

    def _of_conversation(self, of: Conversation) -> list[Passage]:
        template = self._needed_template().of(of.tools)

        def rendered(form: list[Message]) -> list[Passage]:
            if self.loss_on == "completions" and not template.marks_generation:
                return list(self._by_turns(form, of))
            return [self._whole(form, of)]

        return _in_the_best_form(of.messages, rendered)

    def _whole(self, form: list[Message], of: Conversation) -> Passage:
        """All of a conversation, learned but for some turns, or where the template marks it."""
        whole = self._needed_template().render(form, of.tools)
        learned_messages = [form[index] for index in of.learned]
        if self.loss_on == "all":
            taken_out = [self._turn(form, of.tools, index, whole.text) for index in of.unlearned]
            learned = _between(taken_out, len(whole.text)) if taken_out else None
            return Passage(whole.text, learned, True, _left_out(learned_messages, whole.text))
        spans = whole.generated
        if of.unlearned:
            speaks = sorted((*of.learned, *of.unlearned))
            if len(spans) != len(speaks):
                raise DataError(
                    f"the chat template marks {len(spans)} ranges as generated for {len(speaks)} "
                    "messages of the assistant, so that those not to be learned cannot be told"
                )
            spans = tuple(span for span, i in zip(spans, speaks, strict=True) if i in of.learned)
        generated = "".join(whole.text[start:end] for start, end in spans)
        return Passage(whole.text, spans, True, _left_out(learned_messages, generated))

    def _by_turns(self, form: list[Message], of: Conversation) -> Iterator[Passage]:
        """Each turn of the assistant as it is generated, those together that one text shows.

        Some templates render a turn differently once more follows: they leave out what was
        thought. Then the text up to it is a document, in which no earlier turn is learned again.
        A turn without its content or calls is not learned: the model would learn to say nothing.
        """
        template = self._needed_template()
        if not of.learned:
            yield Passage(template.render(form, of.tools).text, (), is_chat=True)
            return
        text = ""
        spans: list[Span] = []
        missing: list[str | None] = []
        for index in of.learned:
            after = template.render(form, of.tools, count=index + 1).text
            start = self._start(form, of.tools, index, after)
            if not after.startswith(text):
                yield Passage(text, tuple(spans), True, _first(missing))
                spans, missing = [], []
            text = after
            missing.append(left_out(form[index], after[start:]))
            if missing[-1] in (None, THOUGHTS):
                spans.append(self._to_the_stop(after, start, len(after)))
        yield Passage(text, tuple(spans), True, _first(missing))

    def _turn(self, form: list[Message], tools: object, index: int, whole: str) -> Span:
        """Where a message stands in the text of the whole conversation."""
        after = self._needed_template().render(form, tools, count=index + 1).text
        _require_prefix(after, whole, f"everything up to message {index + 1}")
        return self._to_the_stop(whole, self._start(form, tools, index, after), len(after))

    def _start(self, form: list[Message], tools: object, index: int, after: str) -> int:
        """Where message `index` begins to be generated, in a text that has it.

        That is where a prompt for it ends. A prompt may open a thought that the message does not
        have; then it is where they part.
        """
        if not index:
            return 0
        template = self._needed_template()
        before = template.render(form, tools, count=index, prompts=True).text
        if after.startswith(before):
            return len(before)
        behind = template.render(form, tools, count=index).text
        _require_prefix(behind, after, f"what comes before message {index + 1}")
        content_start = after.find(str(form[index]["content"] or "").strip(), len(behind))
        parted = _same_chars(before, after)
        return parted if content_start < 0 else min(parted, content_start)

    def _to_the_stop(self, text: str, start: int, end: int) -> Span:
        """Without the white space after the token at which generation stops."""
        spoken = text[start:end].rstrip()
        return (start, start + len(spoken)) if spoken.endswith(self.stops) else (start, end)

    def _needed_template(self) -> ChatTemplate:
        if self.template is None:
            raise DataError(
                "the row has messages, and the tokenizer has no chat template: take the tokenizer "
                "of a chat model, give a template as a file (--chat-template), or make the rows "
                "plain text"
            )
        return self.template


def _in_the_best_form(
    messages: Sequence[Message], rendered: Callable[[list[Message]], list[Passage]]
) -> list[Passage]:
    """In the first form of which nothing is left out, or else the first that can be rendered."""
    best: list[Passage] | None = None
    failure: DataError | None = None
    for form in forms(messages):
        try:
            passages = rendered(form)
        except TemplateLimitError:
            raise
        except DataError as error:
            failure = failure or error
            continue
        # A template that knows no parts prints them as Python does.
        if not any(one.left_out or "{'type': 'text'" in one.text for one in passages):
            return passages
        best = best or passages
    if best is None:
        assert failure is not None, "a conversation has a form"
        raise failure
    return best


def _names(fields: Mapping[str, Any]) -> str:
    found = [name if fields[name] is not None else f"{name} (null)" for name in fields]
    return ", ".join(found) or "none"


def _left_out(learned_messages: Sequence[Message], text: str) -> str | None:
    return _first([left_out(message, text) for message in learned_messages])


def _first(found: Sequence[str | None]) -> str | None:
    return next((one for one in found if one), None)


def _between(taken_out: Sequence[Span], length: int) -> tuple[Span, ...]:
    """The ranges that are left of a text."""
    edges = [0, *(edge for span in taken_out for edge in span), length]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _same_chars(a: str, b: str) -> int:
    """How many characters they begin with alike."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _require_prefix(start: str, whole: str, name: str) -> None:
    if whole.startswith(start):
        return
    same = _same_chars(start, whole)
    raise DataError(
        "the chat template does not show which tokens are the assistant's: it renders "
        f"{name} differently when more follows (from character {same + 1}: "
        f"{start[same : same + 30]!r}, then {whole[same : same + 30]!r}); put "
        f"{{% generation %}} into the template, or {_EVERYTHING}"
    )


def _encodable(text: str) -> str:
    """JSON can name halves of characters, which are no text: they become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # One character for one, so that the learned ranges stay where they are.
        return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
    return text
