"""Pairs of answers: what both follow, and what is left of each behind it."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinstream.data.data_error import DataError
from twinstream.data.encoding.conversation import (
    alpaca_messages,
    alpaca_prompt,
    as_alpaca,
    is_alike,
    kind,
    role_of,
    short,
)
from twinstream.data.shapes import Shape

Answers = tuple[Any, Any]
# Fields that say where a row is from, so that no prompt is in them.
_ORIGINS = (
    *("id", "prompt_id", "source", "dataset", "subset", "split", "language", "lang"),
    *("category", "type", "task", "model", "chosen_model", "rejected_model"),
)


def pair_of(fields: Mapping[str, Any], shape: Shape, *, chat: bool) -> tuple[Any, Answers]:
    """The prompt of a row with `chosen` and `rejected`, and what follows it in each.

    All are texts, or all are lists of messages. A text before messages is the user's, and texts
    behind messages are the assistant's. What both answers repeat of the prompt is taken off them.
    Without a prompt it is what both begin with, as TRL's `extract_prompt` has it: messages that are
    the same or, of texts, up to a space or a line end.

    Args:
        chat: whether instructions are messages, as there is a template.

    Raises:
        DataError: an answer is no text and no messages, is empty, or is the other one; or there is
            no prompt.
    """
    answers = _answers_of(fields)
    chosen, rejected = answers
    prompt = _asked(fields, shape, is_chat=chat or isinstance(chosen, list))
    if isinstance(prompt, list) and isinstance(chosen, str):
        return prompt, ([_spoken("assistant", chosen)], [_spoken("assistant", rejected)])
    if isinstance(prompt, list) and not (
        shape.kind == "messages" and _is_answered(prompt) and is_alike(chosen[0], rejected[0])
    ):
        return _without_repeated(prompt, chosen, rejected)
    if isinstance(prompt, str) and isinstance(chosen, str):
        found = [without_repeated_text(prompt, answer) for answer in answers]
        if None in found:
            return prompt, answers
        (prompt, chosen), (_, rejected) = (one for one in found if one is not None)
        return prompt, (chosen, rejected)
    same = _num_alike(chosen, rejected)
    if not same and isinstance(prompt, str):
        return [_spoken("user", prompt)], answers
    if isinstance(chosen, str):
        _require_no_other_prompt(fields)
    if not 0 < same < min(len(chosen), len(rejected)):
        raise DataError(
            "the row has no `prompt`, and what `chosen` and `rejected` begin with is "
            + ("nothing" if not same else "all of one of them")
        )
    return chosen[:same], (chosen[same:], rejected[same:])


def without_repeated_text(prompt: str, answer: str) -> tuple[str, str] | None:
    """A prompt, and what an answer that begins with it goes on with; None where it does not.

    One word is no repetition: an answer may well begin with that.
    """
    for asked in dict.fromkeys((prompt, prompt.strip())):
        if len(asked.split()) > 1 and answer.startswith(asked) and answer[len(asked) :].strip():
            return asked, answer[len(asked) :]
    return None


def without_repeated(prompt: Sequence[Any], answers: Sequence[Sequence[Any]]) -> int:
    """Return how many messages all answers begin with that the prompt ends with."""
    for count in range(min(len(prompt), *(len(one) - 1 for one in answers)), 0, -1):
        ends = prompt[-count:]
        if all(all(map(is_alike, ends, one[:count])) for one in answers):
            return count
    return 0


def _answers_of(fields: Mapping[str, Any]) -> Answers:
    chosen, rejected = (
        [x] if isinstance(x, dict) else x for x in (fields["chosen"], fields["rejected"])
    )
    if not isinstance(chosen, str | list) or type(chosen) is not type(rejected):
        raise DataError(
            f"`chosen` is {kind(chosen)} and `rejected` {kind(rejected)}: both need to be text, or "
            "lists of messages"
        )
    if empty := [name for name in ("chosen", "rejected") if not fields[name]]:
        raise DataError(f"`{empty[0]}` is empty: a pair needs two answers")
    if chosen == rejected:
        raise DataError("`chosen` and `rejected` are the same: there is nothing to prefer")
    return chosen, rejected


def _asked(fields: Mapping[str, Any], shape: Shape, *, is_chat: bool) -> Any:
    """Text or messages; None where the row has nothing but answers."""
    if shape.kind == "answers":
        return None
    if shape.kind == "instruction":
        asked = as_alpaca(fields, shape.asked)
        return alpaca_messages(asked) if is_chat else alpaca_prompt(asked)
    prompt = fields[shape.asked]
    prompt = [prompt] if isinstance(prompt, dict) else prompt
    if not isinstance(prompt, list) and not (shape.kind == "texts" and isinstance(prompt, str)):
        wanted = "text or a list of messages" if shape.kind == "texts" else "a list of messages"
        raise DataError(
            f"`{shape.asked}` needs to be {wanted}, and is {kind(prompt)}: {short(prompt)}"
        )
    return prompt


def _without_repeated(
    prompt: list[Any], chosen: list[Any], rejected: list[Any]
) -> tuple[Any, Answers]:
    """Without the messages that both answers repeat; what else both are asked is of the prompt."""
    first = without_repeated(prompt, (chosen, rejected))
    chosen, rejected = chosen[first:], rejected[first:]
    more = 0
    while (
        more < min(len(chosen), len(rejected)) - 1
        and not _is_answered(chosen[: more + 1])
        and is_alike(chosen[more], rejected[more])
    ):
        more += 1
    return [*prompt, *chosen[:more]], (chosen[more:], rejected[more:])


def _is_answered(messages: Sequence[Any]) -> bool:
    return role_of(messages[-1]) == "assistant"


def _num_alike(chosen: Any, rejected: Any) -> int:
    """Messages, or characters up to a space or a line end, that both begin with."""
    is_same = is_alike if isinstance(chosen, list) else str.__eq__
    alike = map(is_same, chosen, rejected)
    same = next((i for i, one in enumerate(alike) if not one), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        same = 1 + max(chosen.rfind(end, 0, same) for end in " \n")
    return same


def _require_no_other_prompt(fields: Mapping[str, Any]) -> None:
    """Raise DataError where another field may well be what the answers follow."""
    others = [
        name
        for name, value in fields.items()
        if name not in ("chosen", "rejected", "system", *_ORIGINS)
        and value
        and (isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], dict)))
    ]
    if others:
        raise DataError(
            f"the row has no `prompt`, and `{others[0]}` may be one: say which field it is, "
            f"--columns prompt={others[0]}, or leave out {', '.join(others)}"
        )


def _spoken(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
