"""The shapes of rows that are read: which fields of a row mean what, in one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twinstream.data.data_error import DataError

Kind = Literal["messages", "texts", "instruction", "text", "ids", "answers"]
GOES_ON = "continue_final_message"  # of a row whose last turn is not at its end
_CHAT = ("system", "tools")
_TURNS = (*_CHAT, GOES_ON)
_ASKED = ("history", *_CHAT)
# Fields that are no part of any shape alone, and change what is learned where someone gives them.
_TELLING = (
    *("system", "system_prompt", "tools", "functions", "history", "input", "context"),
    *(GOES_ON, "label", "labels", "weight", "loss_weight", "train", "loss"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
_AS_USUAL: Mapping[str, object] = {
    GOES_ON: False, "weight": 1, "loss_weight": 1, "train": True, "loss": 1
}  # fmt: skip
_MEDIA = _TELLING[-6:]


@dataclass(frozen=True)
class Shape:
    """Fields that make a row what it is.

    Attributes:
        asked: what an answer follows, if anything.
        needs: the fields that a row of it has; what is learned is in the last.
        beside: further fields that count.
    """

    kind: Kind
    needs: tuple[str, ...]
    beside: tuple[str, ...] = ()

    @property
    def asked(self) -> str:
        """Return the name of the field that is answered."""
        return self.needs[0]

    @property
    def answer(self) -> str:
        return self.needs[-1]

    def unread(self, fields: Mapping[str, Any]) -> list[str]:
        """Fields that the row has, that would matter, and that this shape does not know."""
        known = (*self.needs, *self.beside)
        return [
            name
            for name in _TELLING
            if name not in known and is_given(fields, name) and not _is_as_usual(fields, name)
        ]


SHAPES = (
    Shape("messages", ("messages",), _TURNS),
    Shape("messages", ("conversations",), _TURNS),
    Shape("messages", ("conversation",), _TURNS),
    Shape("texts", ("prompt", "completion"), _CHAT),
    Shape("instruction", ("instruction", "output"), ("input", *_ASKED)),
    Shape("text", ("text",)),
    Shape("instruction", ("instruction", "response"), ("context", "input", *_ASKED)),
    Shape("instruction", ("prompt", "response"), _ASKED),
    Shape("instruction", ("query", "response"), _ASKED),
    Shape("instruction", ("question", "response"), ("context", *_ASKED)),
    Shape("instruction", ("question", "answer"), ("context", *_ASKED)),
    Shape("instruction", ("input", "output"), _ASKED),
    Shape("ids", ("input_ids",), ("labels", "attention_mask", "completion_mask")),
)
PAIRS = (  # what both answers follow; the first that a row has
    Shape("texts", ("prompt", "chosen", "rejected"), _CHAT),
    Shape("messages", ("conversations", "chosen", "rejected"), _CHAT),
    Shape("messages", ("conversation", "chosen", "rejected"), _CHAT),
    Shape("messages", ("messages", "chosen", "rejected"), _CHAT),
    Shape("instruction", ("instruction", "chosen", "rejected"), ("input", "context", *_ASKED)),
    Shape("instruction", ("question", "chosen", "rejected"), ("context", *_ASKED)),
    Shape("instruction", ("query", "chosen", "rejected"), _ASKED),
    Shape("instruction", ("input", "chosen", "rejected"), _ASKED),
    Shape("answers", ("chosen", "rejected"), _CHAT),
)
MEANINGS = tuple(
    dict.fromkeys(name for shape in (*SHAPES, *PAIRS) for name in (*shape.needs, *shape.beside))
)
FIELDS = tuple(dict.fromkeys((*MEANINGS, *(name for name in _TELLING if name not in _MEDIA))))
_OPTIONAL = {name for shape in (*SHAPES, *PAIRS) for name in shape.beside}
ROWS = (
    "`text`, `messages` (or `conversations`), `prompt` with `completion`, `instruction` with "
    "`output`, `question` with `answer`, `input_ids`, or, of pairs, `chosen` with `rejected`"
)
NAME_THEM = "rename them, or say which is which: --columns prompt=QUESTION,completion=ANSWER"
Columns = tuple[tuple[str, str], ...]


def shape_of(fields: Mapping[str, Any], *, pairs: bool = False) -> Shape:
    """The first shape of which a row has all fields.

    Raises:
        DataError: it has those of none; says which it has, and what to do.
    """
    if pairs and not (is_given(fields, "chosen") and is_given(fields, "rejected")):
        raise DataError(
            "the loss is of pairs (--loss dpo), and the row lacks `chosen` or `rejected`; it has "
            f"{names_of(fields)}: {NAME_THEM.replace('completion', 'chosen')},rejected=OTHER"
        )
    for is_there in (is_given, _is_not_null):  # an empty list is told of as what it should be
        for shape in PAIRS if pairs else SHAPES:
            if all(is_there(fields, name) for name in shape.needs):
                return shape
    if is_given(fields, "chosen") and is_given(fields, "rejected"):
        remedy = "pairs are trained on with `--loss dpo`"
    else:
        remedy = NAME_THEM
    raise DataError(f"the row has none of the fields {ROWS}; it has {names_of(fields)}: {remedy}")


def is_given(fields: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has a value in a field; an empty text is one, an empty list is none."""
    value = fields.get(name)
    return value is not None and value not in ([], {})


def _is_not_null(fields: Mapping[str, Any], name: str) -> bool:
    return fields.get(name) is not None


def names_of(fields: Mapping[str, Any]) -> str:
    """Return the names of the fields of a row as text."""
    return ", ".join(f"{name}{_emptiness(value)}" for name, value in fields.items()) or "none"


def _emptiness(value: object) -> str:
    if value is None:
        return " (null)"
    return " (empty)" if value in ([], {}) else ""


def columns_of(given: str) -> Columns:
    """
    >>> columns_of("prompt=question,completion=answer")
    (('prompt', 'question'), ('completion', 'answer'))

    Raises:
        DataError: a part is no such pair, or a name is not known or said twice.
    """
    found: list[tuple[str, str]] = []
    for part in given.split(","):
        ours, _, theirs = (text.strip() for text in part.partition("="))
        if not ours or not theirs:
            raise DataError(
                f"columns '{given:.60}': '{part:.40}' is no NAME=COLUMN: write prompt=question,"
                "completion=answer"
            )
        if ours not in MEANINGS:
            raise DataError(
                f"columns '{given:.60}': '{ours:.40}' is nothing that rows have; known: "
                f"{', '.join(MEANINGS)}"
            )
        found.append((ours, theirs))
    for side in range(2):
        names = [pair[side] for pair in found]
        if len(set(names)) < len(names):
            raise DataError(f"columns '{given:.60}': a name stands there twice")
    return tuple(found)


def renamed(fields: Mapping[str, Any], columns: Columns) -> Mapping[str, Any]:
    """A row with its columns under the names that are read.

    Raises:
        DataError: the row lacks a column that it needs.
    """
    if not columns:
        return fields
    for ours, theirs in columns:
        if theirs not in fields and ours not in _OPTIONAL:
            raise DataError(
                f"the row has no `{theirs}` (columns: {ours}={theirs}); it has {names_of(fields)}"
            )
    others = {theirs for _, theirs in columns} | {ours for ours, _ in columns}
    rest = {name: value for name, value in fields.items() if name not in others}
    return rest | {ours: fields.get(theirs) for ours, theirs in columns}


def _is_as_usual(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a field says what is done anyway; an empty text says nothing."""
    value = fields[name]
    return value == "" or (name in _AS_USUAL and value == _AS_USUAL[name])
