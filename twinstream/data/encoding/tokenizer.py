"""Tokenizers: a Hugging Face folder's, or one token per byte."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twinstream.data.data_error import DataError, unreadable
from twinstream.schedule.files import read_text

Ids = NDArray[np.int32]


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
    """What turns text into ids; `before` and `after` go around a document of plain text."""

    before: Ids
    after: Ids
    special: SpecialTokens
    identity: bytes

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Without `before` and `after`."""

    def locate(self, texts: Sequence[str]) -> list[Located]:
        """As `encode`, with where each token is."""


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


def _located_bytes(text: str, ids: Ids) -> Located:
    starts = np.cumsum((ids & 0xC0) != 0x80, dtype=np.int64) - 1
    return Located(ids, starts, starts + 1)


class FileTokenizer:
    """What a tokenizer.json says, with the special tokens of the files beside it."""

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        definition = folder / "tokenizer.json" if path.is_dir() else path
        settings = read_settings(folder)
        text = read_utf8(definition)
        self._tokenizer = _load(text, definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = _named(settings)
        self.special = SpecialTokens(named, self._stops(named, folder))
        self.identity = text.encode() + repr((sorted(named.items()), self.special)).encode()
        self.before, self.after = self._around(named.get("eos_token"))

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [_ids(encoding.ids) for encoding in encodings]

    def locate(self, texts: Sequence[str]) -> list[Located]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [_located(encoding) for encoding in encodings]

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
        beginnings = {named.get(name) for name in ("bos_token", "pad_token", "unk_token")}
        added = self._tokenizer.get_added_tokens_decoder().items()
        stops = {t.content: id for id, t in added if t.special and t.content not in beginnings}
        ends = [self._tokenizer.token_to_id(named["eos_token"])] if "eos_token" in named else []
        declared = _json(folder / "generation_config.json").get("eos_token_id", [])
        ends += declared if isinstance(declared, list) else [declared]
        for end in ends:
            if isinstance(end, int) and (content := self._tokenizer.id_to_token(end)) is not None:
                stops[content] = end
        return stops


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Of a folder or a tokenizer.json; bytes without one.

    Raises:
        DataError: it cannot be read, or `tokenizers` is not installed.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path)


def read_settings(folder: Path) -> dict[str, Any]:
    """What lies in tokenizer_config.json, over special_tokens_map.json; empty without them."""
    return _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")


def _named(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, by their text."""
    named = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named


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
