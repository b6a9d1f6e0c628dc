"""Tokenizers: a Hugging Face folder's, or one token per byte."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from twinstream.data.data_error import DataError, unreadable
from twinstream.schedule.files import read_text

Ids = NDArray[np.int32]
DEFINITION = "tokenizer.json"
# What a slow tokenizer is made of: its class decides what else it does, so none is read alone.
OF_SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", "spiece.model")
_Taken = TypeVar("_Taken")
_PIECE_CHARS = 1 << 18  # of a longer text
_PIECE_END = re.compile(r"(?<=\w)\s")  # white space behind a word, where a token begins anyway
_PIECE_SPACE = re.compile(r"(?<=\w) ")  # the only one that a prepended mark stands for
_LOOK_CHARS = 1 << 10  # for one
_BATCH_CHARS = 1 << 20  # at once: the library holds more than 100 bytes for each


@dataclass(frozen=True)
class Located:
    """Tokens [N] of one text, with the characters [starts, ends) that each is of."""

    ids: Ids
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens: by their names in a template, and those at which generation stops."""

    named: dict[str, str] = field(default_factory=dict)
    stops: dict[str, int] = field(default_factory=dict)


class Tokenizer(Protocol):
    """Turns text into ids; `before` and `after` go around a document of plain text.

    See `missing_affixes` for a text that has them already.
    """

    before: Ids
    after: Ids
    special: SpecialTokens
    identity: bytes

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Encode texts, without `before` and `after`."""

    def locate(self, texts: Sequence[str]) -> list[Located]:
        """Encode texts, and say where each token is."""

    def is_space(self, token: int) -> bool:
        """Return whether a token's text is white space."""


class ByteTokenizer:
    """One token per byte of UTF-8, ids 0 to 255; nothing goes around a document."""

    before = after = np.empty(0, np.int32)
    special = SpecialTokens()
    identity = b"bytes"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def locate(self, texts: Sequence[str]) -> list[Located]:
        return [
            _located_bytes(text, ids) for text, ids in zip(texts, self.encode(texts), strict=True)
        ]

    def is_space(self, token: int) -> bool:
        return chr(token).isspace()


def _located_bytes(text: str, ids: Ids) -> Located:
    starts = np.cumsum((ids & 0xC0) != 0x80, dtype=np.int64) - 1
    return Located(ids, starts, starts + 1)


class FileTokenizer:
    """The tokenizer of a tokenizer.json, with the special tokens of the files beside it."""

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        definition = folder / DEFINITION if path.is_dir() else path
        if path.is_dir() and not definition.exists():
            raise _no_definition(folder)
        settings = read_settings(folder)
        text = read_utf8(definition)
        self._tokenizer = _load(text, definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = _named(settings)
        self.special = SpecialTokens(named, self._stops(named, folder))
        self.identity = text.encode() + repr((sorted(named.items()), self.special)).encode()
        self.before, self.after = self._around(named.get("eos_token"))
        self._prepends = _prepends(json.loads(text).get("normalizer"))

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        encode = self._tokenizer.encode_batch_fast
        found = _by_text(texts, encode, lambda one: _ids(one.ids), prepends=self._prepends)
        return [np.concatenate([ids for _, ids in pieces]) for pieces in found]

    def locate(self, texts: Sequence[str]) -> list[Located]:
        encode = self._tokenizer.encode_batch
        found = _by_text(texts, encode, _located, prepends=self._prepends)
        return [
            Located(
                np.concatenate([piece.ids for _, piece in pieces]),
                np.concatenate([piece.starts + first for first, piece in pieces]),
                np.concatenate([piece.ends + first for first, piece in pieces]),
            )
            for pieces in found
        ]

    def is_space(self, token: int) -> bool:
        return bool(self._tokenizer.decode([token], skip_special_tokens=False).isspace())

    def _around(self, eos: str | None) -> tuple[Ids, Ids]:
        """What the tokenizer itself puts around a text, and the end token if that lacks it."""
        mask = self._tokenizer.encode("a").special_tokens_mask
        ids = self._tokenizer.encode("a").ids
        inner = [i for i, special in enumerate(mask) if not special]
        first, end = (inner[0], inner[-1] + 1) if inner else (len(ids), len(ids))
        after = ids[end:]
        eos_id = None if eos is None else self._tokenizer.token_to_id(eos)
        if eos_id is not None and eos_id not in after:
            after = [*after, eos_id]
        return _ids(ids[:first]), _ids(after)

    def _stops(self, named: dict[str, str], folder: Path) -> dict[str, int]:
        """End tokens, and other special ones at which a template may end a turn."""
        beginnings = {named.get(name) for name in ("bos_token", "unk_token")}
        added = self._tokenizer.get_added_tokens_decoder().items()
        stops = {t.content: id for id, t in added if t.special and t.content not in beginnings}
        ends = [self._tokenizer.token_to_id(named["eos_token"])] if "eos_token" in named else []
        declared = _json(folder / "generation_config.json").get("eos_token_id", [])
        ends += declared if isinstance(declared, list) else [declared]
        for end in ends:
            if isinstance(end, int) and (content := self._tokenizer.id_to_token(end)) is not None:
                stops[content] = end
        return stops


def missing_affixes(tokenizer: Tokenizer, ids: Ids) -> tuple[Ids, Ids]:
    """Return the ids to put before and after a text, where it does not have them already.

    White space behind an end token, as chat templates put it, does not hide that token.
    """
    before, after = tokenizer.before, tokenizer.after
    end = len(ids)
    while len(after) and end and tokenizer.is_space(int(ids[end - 1])):
        end -= 1
    ended = ids[:end]
    begun = next((n for n in range(len(before), 0, -1) if _same(ids[:n], before[-n:])), 0)
    closed = next((n for n in range(len(after), 0, -1) if _same(ended[-n:], after[:n])), 0)
    return before[: len(before) - begun], after[closed:]


def _same(some: Ids, others: Ids) -> bool:
    return np.array_equal(some, others)


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Load the tokenizer of a folder or a tokenizer.json; without one, tokens are bytes.

    Raises:
        DataError: it cannot be read, or `tokenizers` is not installed.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, over special_tokens_map.json; empty without them."""
    return _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")


def _named(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, by their text."""
    named = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named


def _prepends(normalizer: Any) -> bool:
    """Whether a text gets a mark of a space before it, as by Llama 2's normalizer."""
    if not isinstance(normalizer, dict):
        return False
    inner = normalizer.get("normalizers") or []
    return normalizer.get("type") == "Prepend" or any(map(_prepends, inner))


def _by_text(
    texts: Sequence[str],
    encode: Callable[..., Any],
    taken: Callable[[Any], _Taken],
    *,
    prepends: bool,
) -> list[list[tuple[int, _Taken]]]:
    """What is taken of the encoded pieces of each text, each with its first character."""
    found: list[list[tuple[int, _Taken]]] = [[] for _ in texts]
    for batch in _batches(texts, prepends=prepends):
        encoded = encode([piece for _, _, piece in batch], add_special_tokens=False)
        for (text, first, _), encoding in zip(batch, encoded, strict=True):
            found[text].append((first, taken(encoding)))
    return found


def _batches(
    texts: Sequence[str], *, prepends: bool = False
) -> Iterator[list[tuple[int, int, str]]]:
    """Pieces of texts: which text, the piece's first character, and the piece."""
    batch: list[tuple[int, int, str]] = []
    chars = 0
    for index, text in enumerate(texts):
        for first, piece in _pieces(text, prepends=prepends):
            batch.append((index, first, piece))
            chars += len(piece)
            if chars >= _BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def _pieces(text: str, *, prepends: bool = False) -> Iterator[tuple[int, str]]:
    """Whole, or cut before white space, or anywhere if there is none near.

    Where the tokenizer puts the mark of a space first, a piece is without the space that it
    begins with: it would have two.
    """
    first, ending = 0, _PIECE_SPACE if prepends else _PIECE_END
    while len(text) - first > _PIECE_CHARS:
        end = first + _PIECE_CHARS
        ends = ending.finditer(text, max(first + 1, end - _LOOK_CHARS), end)
        end = max((found.start() for found in ends), default=end)
        yield first, text[first:end]
        first = end + (prepends and text[end] == " ")
    yield first, text[first:]


def _located(encoding: Any) -> Located:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0], offsets[:, 1]
    # A tokenizer that trims offsets gives a token of spaces none: it is of what lies before.
    starts = np.where(starts == ends, np.maximum(starts - 1, 0), starts)
    return Located(_ids(encoding.ids), starts, ends)


def _ids(ids: Sequence[int]) -> Ids:
    try:
        return np.array(ids, np.int32)
    except OverflowError:
        raise DataError(
            f"the tokenizer gives token id {max(ids)}, and ids are below {2**31}: mend its "
            "tokenizer.json"
        ) from None


def _load(text: str, definition: Path) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise DataError(
            f"{definition} needs the package `tokenizers`, which is not installed: "
            "pip install tokenizers; without a tokenizer every byte is a token"
        ) from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"{definition} is no tokenizer.json: {error}") from None


def _no_definition(folder: Path) -> DataError:
    found = [name for name in OF_SLOW_TOKENIZERS if (folder / name).exists()]
    beside = f", only {', '.join(found)}, which {'is' if len(found) == 1 else 'are'} not read"
    return DataError(
        f"{folder} has no {DEFINITION}{beside if found else ''}. Make one with transformers, "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), give "
        "--tokenizer FOLDER, or --tokenizer bytes where the model has a token for each byte"
    )


def read_utf8(path: Path) -> str:
    """The text of a small file.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start}") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(read_utf8(path))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}
