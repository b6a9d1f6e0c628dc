"""People's files as training data: opened and checked, then given in packed chunks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from twinstream.data.chunk_stream import ChunkMaker, ChunkStream
from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokeniser import BlockTokeniser, Encoding
from twinstream.data.encoding.template import find_template
from twinstream.data.options import DataOptions, Source
from twinstream.data.order import Order, Position
from twinstream.data.packing import ChunkShape
from twinstream.data.pieces import Ints
from twinstream.data.reading.blocks import Block, lay_out
from twinstream.data.reading.files import combined_hash, content_hashes, find_files
from twinstream.data.sample import Sample, take_sample
from twinstream.data.token_feed import FeedBeside, FeedHere, TokenFeed

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

    A row of .jsonl, .json or .parquet is a document. A .txt or .bin file is one continuous text,
    cut into documents of the longest length and never padded; it is tokenised in blocks of about
    512 KiB, cut at line ends.

    Attributes:
        fingerprint: of contents, tokenizer, template, longest document and options; names,
            places and the number of workers do not count.
        warnings: what a user should know, a line each.
    """

    fingerprint: str
    warnings: tuple[str, ...]
    longest: int
    options: DataOptions
    cache: Path | None
    encoding: Encoding
    blocks: tuple[tuple[Block, ...], ...]
    weights: tuple[float, ...]
    sample: Sample

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
        )
        tokeniser = BlockTokeniser(encoding, cache)
        weights = tuple(source.weight for source in sources)
        found = [find_files(source) for source in sources]
        hashes = iter(content_hashes([file for one in found for file in one.files]))
        by_source = [[next(hashes) for _ in one.files] for one in found]
        block_bytes = _block_bytes(sum(f.size_bytes for one in found for f in one.files), longest)
        blocks = tuple(
            tuple(lay_out(one.files, its_hashes, block_bytes))
            for one, its_hashes in zip(found, by_source, strict=True)
        )
        for source, its_blocks in zip(sources, blocks, strict=True):
            if not its_blocks:
                raise DataError(f"{source.path} has no rows: there is nothing to train on")
        refuses = options.long_documents == "refuse"
        sample = take_sample(blocks, weights, tokeniser, longest, refuse_long=refuses)
        fingerprint = combined_hash(
            (_LAYOUT, tokeniser.identity, longest, options.long_documents, weights, by_source)
        )
        return cls(
            fingerprint,
            (*(one.left_out for one in found if one.left_out), *sample.warnings),
            longest,
            options,
            cache,
            encoding,
            blocks,
            weights,
            sample,
        )

    def lengths(self) -> Ints:
        """Tokens of each document of a seeded sample, as they are packed (long ones cut)."""
        return self.sample.lengths

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch, with the weights: an estimate by the sample, without padding."""
        return self.sample.epoch_tokens

    def require_same(self, fingerprint: str) -> None:
        """Refuse to go on with other data than before.

        Raises:
            DataError: the fingerprint is not this data's.
        """
        if fingerprint != self.fingerprint:
            raise DataError(
                f"the data is not that of the checkpoint (fingerprint {self.fingerprint[:12]}, "
                f"then {fingerprint[:12]}): a file, the tokenizer, its template, a weight, the "
                "longest document or an option changed; give what there was, or start a new run"
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
        shape = ChunkShape(chunk_tokens, self.longest, most_documents, alone)
        name = combined_hash((self.fingerprint, seed, *asdict(shape).values()))[:16]
        if start.order not in ("", name):
            raise DataError(
                f"the position is of another order of the data ({start.order}, not {name}): go on "
                "with the same data, seed, chunk tokens and documents per chunk, or start anew"
            )
        group_bytes = max(_GROUP_BYTES, _GROUP_CHUNKS * _BYTES_PER_TOKEN * chunk_tokens)
        order = Order(self.blocks, self.weights, seed, group_bytes)
        refuse_long = self.options.long_documents == "refuse"
        maker = ChunkMaker(order, shape, self._feed(), refuse_long, name)
        return ChunkStream(maker, start, ahead=self.options.workers > 0)

    def _feed(self) -> TokenFeed:
        if self.options.workers > 0:
            return FeedBeside(self.encoding, self.cache, self.options.workers)
        return FeedHere(BlockTokeniser(self.encoding, self.cache))


def _block_bytes(total_bytes: int, longest: int) -> int:
    wanted = max(_BLOCK_BYTES, _BLOCK_BYTES_PER_TOKEN_OF_LONGEST * longest)
    return max(wanted, total_bytes // _MOST_BLOCKS)
