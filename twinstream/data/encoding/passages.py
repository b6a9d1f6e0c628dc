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
    as_alpaca,
    conversation_of,
    forms,
    left_out,
    text_of,
    undescribed,
)
from twinstream.data.encoding.pairs import pair_of, without_repeated, without_repeated_text
from twinstream.data.encoding.pretokenised import TokenRow, token_row
from twinstream.data.encoding.template import ChatTemplate, Span, TemplateLimitError
from twinstream.data.reading.rows import DataRow
from twinstream.data.shapes import Columns, Shape, renamed, shape_of

_EVERYTHING = 'train on everything (loss_on="all")'


@dataclass(frozen=True)
class Passage:
    """One document's text.

    Attributes:
        learned: ranges of characters; None is everything.
        is_chat: the template has put its special tokens in, so that none go around it.
        left_out: what the assistant says and the template does not render, if anything.
        told: what else a user should know of it; each ends a sentence that begins with a count.
        tokens: in place of a text.
    """

    text: str
    learned: tuple[Span, ...] | None = None
    is_chat: bool = False
    left_out: str | None = None
    told: tuple[str, ...] = ()
    tokens: TokenRow | None = None


@dataclass(frozen=True)
class PassageMaker:
    """Makes passages of rows, by their shapes (`twinstream.data.shapes`).

    Attributes:
        stops: the texts of the tokens at which generation stops.
        pairs: of each row two passages, what is chosen and what is rejected.
        columns: what columns of rows are read as.
    """

    template: ChatTemplate | None
    loss_on: Literal["completions", "all"]
    stops: tuple[str, ...]
    pairs: bool = False
    columns: Columns = ()

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

    def _passages(self, given: Mapping[str, Any]) -> list[Passage]:
        fields = renamed(given, self.columns)
        shape = shape_of(fields, pairs=self.pairs)
        found = self._of_pair(fields, shape) if self.pairs else self._of_row(fields, shape)
        unread = [f"whose `{name}` is not used" for name in shape.unread(fields)]
        counts = [name for name in shape.beside if fields.get(name)]
        if "system" in counts and not any(one.is_chat for one in found):
            unread.append("whose `system` is not used: nothing of them is a chat")
        if "tools" in counts and any(undescribed(fields, one.text) for one in found):
            unread.append("whose `tools` are not used: the text does not name them")
        return [replace(one, told=(*one.told, *unread)) for one in found]

    def _of_row(self, fields: Mapping[str, Any], shape: Shape) -> list[Passage]:
        match shape.kind:
            case "messages":
                return self._of_conversation(conversation_of(fields, shape.asked))
            case "texts" if isinstance(fields["prompt"], str):
                return [self._of_texts(fields)]
            case "texts":
                return self._answered_in_messages(fields)
            case "instruction":
                asked = as_alpaca(fields, shape.asked, shape.answer)
                if self.template is not None or fields.get("history"):
                    return self._of_conversation(alpaca_conversation(asked))
                return [self._answered(alpaca_prompt(asked), asked["output"])]
            case "ids":
                tokens = token_row(fields, everything=self.loss_on == "all")
                return [Passage("", None, is_chat=True, tokens=tokens)]
            case _:
                return [Passage(text_of(fields, "text"))]

    def _of_texts(self, fields: Mapping[str, Any]) -> Passage:
        """A prompt and a completion; a chat where a system message stands beside them."""
        prompt, completion = fields["prompt"], text_of(fields, "completion")
        told: tuple[str, ...] = ()
        if (apart := without_repeated_text(prompt, completion)) is not None:
            prompt, completion = apart
            told = ("whose completion begins with the prompt, which is there once",)
        if self._has_system(fields, prompt):
            messages = _in_messages(fields, prompt, completion)
            (found,) = self._answered_in_messages(messages)
        else:
            found = self._answered(prompt, completion)
        return replace(found, told=told)

    def _has_system(self, fields: Mapping[str, Any], prompt: str) -> bool:
        """Whether a text has a system message beside it, and is not rendered yet."""
        is_rendered = any(stop in prompt for stop in self.stops)
        return self.template is not None and "system" in fields and not is_rendered

    def _of_pair(self, fields: Mapping[str, Any], shape: Shape) -> list[Passage]:
        """What is chosen, then what is rejected, each behind the prompt of both."""
        prompt, answers = pair_of(fields, shape, chat=self.template is not None)
        if isinstance(prompt, str) and not self._has_system(fields, prompt):
            found = [self._answered(prompt, answer) for answer in answers]
        else:
            found = [
                one
                for answer in answers
                for one in self._answered_in_messages(_in_messages(fields, prompt, answer))
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
        said = answer.messages[without_repeated(prompt.messages, [answer.messages]) :]
        opened = _open_turn(prompt.messages[-1], said[0])
        behind = len(prompt.messages) - (opened is not None)
        going_on = [*prompt.messages[:behind], *said]
        if opened is not None:
            going_on[behind] = {**said[0], "content": opened + said[0]["content"]}
        learned = [i for i in range(behind, len(going_on)) if going_on[i]["role"] == "assistant"]

        def rendered(form: list[Message]) -> list[Passage]:
            template, tools = self._needed_template(), prompt.tools
            whole = template.render(form, tools).text
            learned_messages = [form[index] for index in learned]
            if self.loss_on == "all":
                return [Passage(whole, None, True, _left_out(learned_messages, whole))]
            start = self._start(form, tools, behind, whole)
            missing = _left_out(learned_messages, whole[start:])
            span = self._to_the_stop(whole, _behind(opened, whole, start), len(whole))
            return [Passage(whole, (span,), True, missing)]

        return _in_the_best_form(going_on, rendered)

    def _of_conversation(self, of: Conversation) -> list[Passage]:
        template = self._needed_template().of(of.tools)

        def rendered(form: list[Message]) -> list[Passage]:
            if self.loss_on == "completions" and not template.marks_generation:
                found = list(self._by_turns(form, of))
            else:
                found = [self._whole(form, of)]
            return [*found[:-1], _left_open(found[-1], form[-1])] if of.is_open else found

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
        template = self._needed_template()
        if not index:
            return self._start_of_first(form, tools, after)
        before = template.render(form, tools, count=index, prompts=True).text
        if after.startswith(before):
            return len(before)
        behind = template.render(form, tools, count=index).text
        _require_prefix(behind, after, f"what comes before message {index + 1}")
        content_start = after.find(str(form[index]["content"] or "").strip(), len(behind))
        parted = _same_chars(before, after)
        return parted if content_start < 0 else min(parted, content_start)

    def _start_of_first(self, form: list[Message], tools: object, after: str) -> int:
        """Where a chat that the assistant begins does: behind the header of its turn.

        Some templates refuse to render nothing; then it is where the content begins.
        """
        try:
            before = self._needed_template().render(form, tools, count=0, prompts=True).text
        except TemplateLimitError:
            raise
        except DataError:
            before = ""
        if before and after.startswith(before):
            return len(before)
        return max(0, after.find(str(form[0]["content"] or "").strip()))

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


def _in_messages(fields: Mapping[str, Any], prompt: Any, answer: Any) -> dict[str, Any]:
    """A row with a prompt and a completion that are messages."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return {**fields, "prompt": asked, "completion": said}


def _open_turn(last: Message, first: Message) -> str | None:
    """What a prompt makes the assistant begin with, for the first message to go on with."""
    if last["role"] != "assistant" or first["role"] != "assistant" or last.get("tool_calls"):
        return None
    begun, more = last["content"], first["content"]
    return begun if isinstance(begun, str) and isinstance(more, str) else None


def _left_open(passage: Passage, last: Message) -> Passage:
    """Up to the end of the last message, as transformers' `continue_final_message` ends it."""
    said, text = last["content"], passage.text
    if not isinstance(said, str) or not said.strip() or said.strip() not in text:
        raise DataError(
            "the last message is to be gone on with, and has no text that the chat template renders"
        )
    at = text.rindex(said.strip())
    keeps_space = text.startswith(said.lstrip(), at)
    end = at + len(said.lstrip() if keeps_space else said.strip())
    spans = None
    if passage.learned is not None:
        spans = tuple((start, min(stop, end)) for start, stop in passage.learned if start < end)
    return replace(passage, text=text[:end], learned=spans)


def _behind(opened: str | None, whole: str, start: int) -> int:
    """Where a turn goes on behind what it was opened with."""
    if not opened or not opened.strip():
        return start
    begun = opened.lstrip()
    at = whole.find(begun, start)
    if at < 0:
        raise DataError(
            "the chat template does not show where the completion goes on with the prompt's last "
            f"message, {begun[:40]!r}: put both into one message, or {_EVERYTHING}"
        )
    return at + len(begun)


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
