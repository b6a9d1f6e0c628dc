"""Blocks of files into tokens, through the cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.encoding.cache import TokenCache
from twinstream.data.encoding.passages import Passage, PassageMaker
from twinstream.data.encoding.template import ChatTemplate, TemplateSources
from twinstream.data.encoding.tokenizer import Ids, load_tokenizer, missing_affixes
from twinstream.data.reading.bins import read_bin
from twinstream.data.reading.blocks import DataBlock, FileRange, digest_of, unchanged
from twinstream.data.reading.files import combined_hash
from twinstream.data.reading.parquet import bytes_of_group
from twinstream.data.reading.ranges import digest_of_range, text_in
from twinstream.data.reading.rows import DataRow, first_number, rows_of
from twinstream.data.shapes import Columns

_MOST_TOLD = 300  # characters of why a row is skipped
_FORMAT = 2  # of the tokens of a run, which goes on only with the same
_CACHED = 3  # of what the cache keeps; another one when tokens of the same content change


@dataclass(frozen=True)
class Encoding:
    """All that decides the tokens of a content; it goes to other processes as it is."""

    tokenizer: Path | None
    template: TemplateSources | None
    loss_on: Literal["completions", "all"]
    today: date
    vocab_size: int | None
    skips_bad_rows: bool = False
    pairs: bool = False
    columns: Columns = ()


class BlockTokeniser:
    """Makes tokens of blocks, or takes those of an earlier run from the cache."""

    def __init__(self, encoding: Encoding, cache: Path | None) -> None:
        self.tokenizer = load_tokenizer(encoding.tokenizer)
        special = self.tokenizer.special
        template, of_tools, sources = None, None, encoding.template
        if sources is not None and sources.for_tools is not None:
            of_tools = ChatTemplate(sources.for_tools, special.named, encoding.today)
        if sources is not None:
            template = ChatTemplate(
                sources.default, special.named, encoding.today, for_tools=of_tools
            )
        self._maker = PassageMaker(
            template, encoding.loss_on, tuple(special.stops), encoding.pairs, encoding.columns
        )
        self._columns = tuple(theirs for _, theirs in encoding.columns)
        self.sides = 2 if encoding.pairs else 1  # documents of a row, where that is fixed
        self._vocab_size, self._skips = encoding.vocab_size, encoding.skips_bad_rows
        self._cache = None if cache is None else TokenCache(cache)
        self.identity = combined_hash(
            (_FORMAT, self.tokenizer.identity, None if sources is None else sources.default,
             encoding.loss_on, encoding.today, *(("pairs",) if encoding.pairs else ()),
             *((("columns", encoding.columns),) if encoding.columns else ()),
             *((sources.for_tools,) if of_tools is not None and sources is not None else ()))
        )  # fmt: skip

    def tokens(self, block: DataBlock) -> BlockTokens:
        """Return the tokens of all documents of a block.

        Raises:
            DataError: a row or a file cannot be used or has changed, or has ids that the model
                does not know.
        """
        if self._cache is None or block.kind == "bin":
            return self.fresh(block)
        with unchanged(block):
            key = self._key(block)
            tokens = self._cache.get(key)
            if tokens is None or (tokens.skipped and not self._skips):
                tokens, _ = self._made(block)
                self._cache.put(key, tokens)
            self._check_ids(block, tokens)
        return tokens

    def fresh(self, block: DataBlock) -> BlockTokens:
        """Return a block's tokens without reading or writing the cache."""
        return self.sampled(block)[0]

    def sampled(self, block: DataBlock) -> tuple[BlockTokens, list[Passage]]:
        """Return fresh tokens with the texts of the documents, if these are rows."""
        with unchanged(block):
            tokens, passages = self._made(block)
            self._check_ids(block, tokens)
        return tokens, passages

    def _made(self, block: DataBlock) -> tuple[BlockTokens, list[Passage]]:
        if block.is_continuous and self.sides > 1:
            raise DataError(
                f"{block.parts[0].path} is text, and the loss is of pairs (--loss dpo): give rows "
                "with `prompt`, `chosen` and `rejected`"
            )
        if not block.is_continuous:
            skipped: list[str] = []
            by_row = [self._passages(row, skipped) for row in _rows(block, self._columns)]
            passages = list(chain.from_iterable(by_row))
            rows = [index for index, found in enumerate(by_row) for _ in found]
            tokens = self._of_passages(passages, rows)
            return replace(tokens, skipped=tuple(skipped)), passages
        if block.kind == "bin":
            runs = [read_bin(part.path, part.first, part.end) for part in block.parts]
        else:
            runs = [self._of_text(part) for part in block.parts]
        masks = [np.ones(len(run), np.bool_) for run in runs]
        return _joined(runs, masks, range(len(runs))), []

    def _passages(self, row: DataRow, skipped: list[str]) -> list[Passage]:
        """Of a row that cannot be used and is skipped one that is empty."""
        try:
            return self._maker.passages(row)
        except DataError as error:
            if not self._skips:
                raise
            skipped.append(f"{error!s:.{_MOST_TOLD}}")
            return self.sides * [Passage("", None, is_chat=True)]

    def _of_text(self, part: FileRange) -> Ids:
        """A piece of a text file: what goes around a document goes around the whole file."""
        text, start = text_in(part.path, part.first, part.end)
        (ids,) = self.tokenizer.encode([text]) if text else (np.empty(0, np.int32),)
        reaches_end = start + len(text.encode()) >= part.file_bytes
        before, after = missing_affixes(self.tokenizer, ids)
        parts = [before[: None if part.first == 0 else 0], ids]
        return np.concatenate([*parts, after] if text and reaches_end else parts)

    def _of_passages(self, passages: Sequence[Passage], rows: Sequence[int]) -> BlockTokens:
        texts = [p for p in passages if p.tokens is None]
        located = iter(self.tokenizer.locate([p.text for p in texts if p.learned is not None]))
        plain = iter(self.tokenizer.encode([p.text for p in texts if p.learned is None]))
        runs, masks = [], []
        for passage in passages:
            if passage.tokens is not None:
                ids, learned = passage.tokens.ids, passage.tokens.learned
            elif passage.learned is None:
                ids = next(plain)
                learned = np.ones(len(ids), np.bool_)
            else:
                tokens = next(located)
                ids = tokens.ids
                learned = np.zeros(len(ids), np.bool_)
                for start, end in passage.learned:
                    learned |= (tokens.ends > start) & (tokens.starts < end)
            if not passage.is_chat:
                before, after = missing_affixes(self.tokenizer, ids)
                masks_before = [np.full(len(before), passage.learned is None), learned]
                learned = np.concatenate([*masks_before, np.ones(len(after), np.bool_)])
                ids = np.concatenate([before, ids, after])
            runs.append(ids)
            masks.append(learned)
        return _joined(runs, masks, rows)

    def _key(self, block: DataBlock) -> str:
        """Of the content of its parts, and of the encoding."""
        return combined_hash((_CACHED, self.identity, block.kind, *map(_content, block.parts)))

    def _check_ids(self, block: DataBlock, tokens: BlockTokens) -> None:
        if self._vocab_size is None or not len(tokens.ids):
            return
        largest = int(tokens.ids.max())
        if largest < self._vocab_size:
            return
        document = int(np.searchsorted(tokens.ends, tokens.ids.argmax(), side="right"))
        raise DataError(
            f"{document_place(block, tokens, document)}: token id {largest} is outside the model's "
            f"vocabulary of {self._vocab_size} ids (0 to {self._vocab_size - 1}); take the model's "
            "own tokenizer, or a model with a larger vocabulary"
        )


def document_place(block: DataBlock, tokens: BlockTokens, document: int) -> str:
    """File and line, or row, of a document of a block; of a text or .bin its file."""
    row = int(tokens.rows[document])
    if block.is_continuous:
        return str(block.parts[row].path)
    return next(islice(_rows(block), row, None)).where()


def row_places(block: DataBlock) -> list[tuple[str, int | None]]:
    """Return of each row of a block its file and its line or row there, from 1; of each part of a
    block of text, or of a .bin file, its file alone."""
    if block.is_continuous:
        return [(str(part.path), None) for part in block.parts]
    return [
        (str(part.path), first + row.index)
        for part in block.parts
        for first in [first_number(part)]
        for row in rows_of(part)
    ]


def _rows(block: DataBlock, columns: tuple[str, ...] = ()) -> Iterator[DataRow]:
    return chain.from_iterable(rows_of(part, columns) for part in block.parts)


def _content(part: FileRange) -> object:
    """
    Raises:
        DataError: it is not what it was when the data was opened.
    """
    if part.kind in ("parquet", "array", "csv"):  # the file's hash may be of samples of it
        begin, end = part.first, part.end
        if part.kind == "parquet":
            begin, end = bytes_of_group(part.path, part.row_group)
        digest = digest_of_range(part.path, begin, end)
        return part.content_hash, part.row_group, part.first, part.end, digest
    content, start = part.content()
    digest = digest_of(content)
    if part.digest not in ("", digest):
        raise DataError(
            f"{part.path}, bytes {part.first} to {part.end}: they have changed since the file was "
            "opened. Put it back as it was"
        )
    if part.kind == "lines":
        return bytes.fromhex(digest)
    return part.first == 0, start + len(content) >= part.file_bytes, bytes.fromhex(digest)


def _joined(
    runs: Sequence[Ids], masks: Sequence[NDArray[np.bool_]], rows: Sequence[int]
) -> BlockTokens:
    """One document each."""
    none = np.empty(0, np.int32)
    return BlockTokens(
        np.concatenate([none, *runs]),
        np.concatenate([none.astype(np.bool_), *masks]),
        np.cumsum([len(run) for run in runs], dtype=np.int64),
        np.array(rows, np.int64),
    )
