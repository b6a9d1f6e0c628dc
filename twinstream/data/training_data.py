"""People's files as training data: opened and checked, then given in packed chunks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from twinstream.data.chunk_stream import ChunkMaker, ChunkStream, SkippedRows
from twinstream.data.data_error import DataError
from twinstream.data.data_record import DataRecord, SourceRecord
from twinstream.data.encoding.block_tokeniser import BlockTokeniser, Encoding
from twinstream.data.encoding.template import find_template
from twinstream.data.options import DataOptions, Source
from twinstream.data.order import Order, Position
from twinstream.data.packing import Chunk, ChunkShape, empty_chunk
from twinstream.data.reading.blocks import DataBlock, split_into_blocks
from twinstream.data.reading.files import (
    DataFile,
    are_hashed_whole,
    combined_hash,
    content_hashes,
    find_files,
)
from twinstream.data.sample import Sample, take_sample
from twinstream.data.spans import Ints
from twinstream.data.token_feed import InlineTokenFeed, ProcessTokenFeed, TokenFeed

_BLOCK_BYTES = 1 << 19
_BLOCK_BYTES_PER_TOKEN_OF_LONGEST = 16  # some documents of full length in each block
_MOST_BLOCKS = 50_000
_GROUP_BYTES = 8 << 20
_GROUP_CHUNKS = 64  # so many at least, so that the last ones, not full, count for little
_BYTES_PER_TOKEN = 4
_LAYOUT = 1  # of blocks, groups and shuffles; another one when the same data gives other chunks


@dataclass(frozen=True)
class TrainingData:
    """Files, and how they become chunks.

    A row of .jsonl, .json, .parquet or .csv is a document. A .txt or .bin file is one continuous
    text, cut into documents of the longest length and never padded; it is tokenised in blocks of
    about 512 KiB, cut at line ends.

    Attributes:
        fingerprint: of contents, tokenizer, template, longest document and options; names,
            places and the number of workers do not count.
        warnings: what a user should know, a line each.
        record: from which a run that goes on knows its data again.
        changed: blocks that are no longer what they were when the run began.
    """

    fingerprint: str
    warnings: tuple[str, ...]
    longest: int
    options: DataOptions
    cache: Path | None
    encoding: Encoding
    blocks: tuple[tuple[DataBlock, ...], ...]
    weights: tuple[float, ...]
    sample: Sample
    files: tuple[tuple[DataFile, ...], ...]
    record: DataRecord
    changed: frozenset[DataBlock] = frozenset()

    @classmethod
    def open(
        cls,
        sources: Sequence[Source],
        tokenizer: Path | None,
        *,
        longest: int,
        options: DataOptions = DataOptions(),  # noqa: B008 - frozen
        cache: Path | None = None,
        vocab_size: int | None = None,
    ) -> Self:
        """Find and hash the files, and read a sample of them.

        Args:
            tokenizer: a folder of Hugging Face, or a tokenizer.json; None is bytes.
            longest: tokens of the longest document.
            cache: a folder that keeps tokens for this run and others.
            vocab_size: of the model; ids from there on are refused.

        Raises:
            DataError: a file, a row, the tokenizer or the template cannot be used, or nothing in
                the sample can be learned.
        """
        if not sources:
            raise DataError("there is no file to train on: name at least one file or folder")
        encoding = Encoding(
            tokenizer,
            find_template(tokenizer, options.chat_template),
            options.loss_on,
            options.today,
            vocab_size,
            skips_bad_rows=options.skip_bad_rows > 0,
            pairs=options.pairs,
            columns=options.columns,
        )
        tokeniser = BlockTokeniser(encoding, cache)
        weights = tuple(source.weight for source in sources)
        found = [find_files(source) for source in sources]
        by_source, blocks = _laid_out(
            [one.files for one in found], longest, [theirs for _, theirs in options.columns]
        )
        for source, its_blocks in zip(sources, blocks, strict=True):
            if not its_blocks:
                raise DataError(f"{source.path} has no rows: there is nothing to train on")
        skipped = SkippedRows(options.skip_bad_rows)
        refuse_long = options.long_documents == "refuse"
        sample = take_sample(blocks, weights, tokeniser, longest, skipped, refuse_long=refuse_long)
        settings = (_LAYOUT, tokeniser.identity, longest, options.long_documents, weights)
        fingerprint = combined_hash((*settings, by_source))
        record = DataRecord(
            fingerprint=fingerprint,
            settings=combined_hash(settings),
            sources=tuple(
                SourceRecord.of(one.files, its_hashes, its_blocks)
                for one, its_hashes, its_blocks in zip(found, by_source, blocks, strict=True)
            ),
        )
        return cls(
            fingerprint, (*(one.left_out for one in found if one.left_out), *sample.warnings),
            longest, options, cache, encoding, blocks,
            weights, sample, tuple(one.files for one in found), record,
        )  # fmt: skip

    def lengths(self) -> Ints:
        """Tokens of each document of a seeded sample, as they are packed (long ones cut)."""
        return self.sample.lengths

    @property
    def sides(self) -> int:
        """Documents of a row: one, or the two of a pair."""
        return 2 if self.options.pairs else 1

    @property
    def text(self) -> str:
        """What there is, for a screen."""
        lengths = self.lengths()
        return (
            f"about {self.epoch_tokens:,} tokens an epoch, documents of "
            f"{int(lengths.mean()):,} tokens on average, {int(lengths.max()):,} at most"
        )

    @property
    def unit(self) -> str:
        """What a step has so many of."""
        return "pairs" if self.options.pairs else "documents"

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch, with the weights: an estimate by the sample, without padding."""
        return self.sample.epoch_tokens

    def gone_on_with(self, fingerprint: str, record: DataRecord | None) -> Self:
        """The data in the blocks of a run that began with it, or with files mended since.

        Args:
            record: of that run; None where there is none, as of an earlier twinstream.

        Raises:
            DataError: the data is other data.
        """
        known = record is not None and record.fingerprint == fingerprint
        if record is not None and known and record.settings == self.record.settings:
            hashes = [[one.content_hash for one in source.files] for source in self.record.sources]
            found = [
                source.blocks_of(files, its_hashes)
                for source, files, its_hashes in zip(
                    record.sources, self.files, hashes, strict=True
                )
            ]
            if None not in found:
                return self._with_blocks(fingerprint, [blocks for blocks in found if blocks])
        if fingerprint == self.fingerprint:
            return self
        raise DataError(
            f"the data is not that of the checkpoint (fingerprint {self.fingerprint[:12]}, "
            f"then {fingerprint[:12]}): a file, the tokenizer, its template, a weight, the "
            "longest document or an option changed; give what there was, or start a new run"
        )

    def _with_blocks(
        self, fingerprint: str, found: Sequence[Sequence[tuple[DataBlock, bool]]]
    ) -> Self:
        """In other blocks than it was opened with; with each whether it has changed."""
        blocks = tuple(tuple(block for block, _ in source) for source in found)
        sources = [
            SourceRecord.of(files, [one.content_hash for one in source.files], its_blocks)
            for files, source, its_blocks in zip(
                self.files, self.record.sources, blocks, strict=True
            )
        ]
        kept = {"fingerprint": fingerprint, "sources": tuple(sources)}
        return replace(
            self,
            fingerprint=fingerprint,
            blocks=blocks,
            record=self.record.model_copy(update=kept),
            changed=frozenset(block for source in found for block, is_new in source if is_new),
        )

    def chunks(
        self,
        *,
        chunk_tokens: int,
        most_documents: int,
        seed: int,
        start: Position = Position(),  # noqa: B008 - frozen
        alone: bool = False,
    ) -> ChunkStream:
        """Packed chunks without end, epoch after epoch.

        Args:
            chunk_tokens: T of each chunk, at least `longest`.
            most_documents: entries of a chunk's `lengths` at most, padding among them.
            alone: each document has a chunk of its own, as models need that take a chunk in
                slices, which know of no documents.
            start: the `position` of a stream with the same arguments, which is gone on with.

        Raises:
            DataError: the shape is impossible, or the position is of other data or arguments.
        """
        shape = ChunkShape(chunk_tokens, self.longest, most_documents, alone, self.sides)
        decides = [value for name, value in asdict(shape).items() if name != "sides"]
        name = combined_hash((self.fingerprint, seed, *decides))[:16]
        if start.order not in ("", name):
            raise DataError(
                f"the position is of another order of the data ({start.order}, not {name}): go on "
                "with the same data, seed, chunk tokens and documents per chunk, or start anew"
            )
        self.require_unread(chunk_tokens, seed, start)
        order = self._order(chunk_tokens, seed)
        refuse_long = self.options.long_documents == "refuse"
        skipped = SkippedRows(self.options.skip_bad_rows)
        maker = ChunkMaker(order, shape, self.feed(), refuse_long, name, skipped)
        return ChunkStream(
            maker.chunks(start), start, ahead=self.options.workers > 0,
            skipped=skipped.problems, feed=maker.feed,
        )  # fmt: skip

    def empty_chunk(self, shape: ChunkShape) -> Chunk:
        """Return a chunk of padding alone."""
        return empty_chunk(shape)

    def _order(self, chunk_tokens: int, seed: int) -> Order:
        group_bytes = max(_GROUP_BYTES, _GROUP_CHUNKS * _BYTES_PER_TOKEN * chunk_tokens)
        return Order(self.blocks, self.weights, seed, group_bytes)

    def require_unread(self, chunk_tokens: int, seed: int, start: Position) -> None:
        """
        Raises:
            DataError: something that changed has been read before this position, or it is none.
        """
        groups = self._order(chunk_tokens, seed).groups(start.epoch)
        if start.group >= len(groups):
            raise DataError(
                f"the position is in group {start.group} of the data, which has {len(groups)}: the "
                "checkpoint is damaged; go on from the one before it"
            )
        if not self.changed:
            return
        groups = groups[: start.group + (start.chunk > 0)]
        read = {block_slice.block for group in groups for block_slice in group}
        for block in self.changed & read if start.epoch == 0 else self.changed:
            raise DataError(
                f"{block.parts[0].path} has changed where this run has read it: mend only what it "
                "has not come to, let bad rows be skipped (skip_bad_rows), or start a new run"
            )

    def feed(self) -> TokenFeed:
        """Return what makes the tokens of blocks; it is to be closed."""
        if self.options.workers > 0:
            return ProcessTokenFeed(self.encoding, self.cache, self.options.workers)
        return InlineTokenFeed(BlockTokeniser(self.encoding, self.cache))


def _laid_out(
    files: Sequence[Sequence[DataFile]], longest: int, columns: Sequence[str]
) -> tuple[list[list[str]], tuple[tuple[DataBlock, ...], ...]]:
    """Of each source, a hash of each file, and its blocks."""
    all_files = [file for its_files in files for file in its_files]
    hashes = iter(content_hashes(all_files))
    by_source = [[next(hashes) for _ in its_files] for its_files in files]
    block_bytes = _block_bytes(sum(file.size_bytes for file in all_files), longest)
    laid_out = [
        split_into_blocks(its_files, its_hashes, block_bytes, columns)
        for its_files, its_hashes in zip(files, by_source, strict=True)
    ]
    if are_hashed_whole(all_files):
        laid_out = [[block.with_digests() for block in its_blocks] for its_blocks in laid_out]
    return by_source, tuple(map(tuple, laid_out))


def _block_bytes(total_bytes: int, longest: int) -> int:
    wanted = max(_BLOCK_BYTES, _BLOCK_BYTES_PER_TOKEN_OF_LONGEST * longest)
    return max(wanted, total_bytes // _MOST_BLOCKS)
