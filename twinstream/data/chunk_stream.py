"""Chunks one after another, without end, from any position."""

import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Self

from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokeniser import document_place
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.order import BlockSlice, Order, Position, shuffled
from twinstream.data.packing import Chunk, ChunkShape, chunk_of, pack
from twinstream.data.reading.blocks import DataBlock
from twinstream.data.spans import Spans, cut, first_too_long, joined, sizes_for
from twinstream.data.token_feed import TokenFeed

_READY_CHUNKS = 8
_POLL_S = 0.1


class SkippedRows:
    """Counts the rows that cannot be used, of each block once.

    Attributes:
        told: what is wrong with each.
    """

    def __init__(self, most: int) -> None:
        self._most, self._blocks = most, set[DataBlock]()
        self.problems: list[str] = []

    def add(self, block: DataBlock, tokens: BlockTokens) -> None:
        """Add the skipped rows of a block; raises DataError if there are too many."""
        if block in self._blocks:
            return
        self._blocks.add(block)
        self.problems += tokens.skipped
        if len(self.problems) > self._most:
            raise DataError(
                f"{len(self.problems)} rows cannot be used, and {self._most} may be skipped "
                f"(skip_bad_rows); the last: {self.problems[-1]}"
            )


@dataclass(frozen=True)
class ChunkMaker:
    """Makes the chunks of groups: all of a group's documents, shuffled and packed together."""

    order: Order
    shape: ChunkShape
    feed: TokenFeed
    refuse_long: bool
    name: str
    skipped: SkippedRows

    def chunks(self, start: Position) -> Iterator[tuple[Chunk, Position]]:
        """Yield the chunks from a position on, each with the position after it.

        Raises:
            DataError: a file or row cannot be used; nothing can be learned from any of them.
        """
        epochs_of_nothing = 0
        while epochs_of_nothing <= self.order.most_epochs_of_nothing:
            epochs_of_nothing += 1
            for chunk, position in self._of_epoch(start):
                epochs_of_nothing = 0
                yield chunk, position
            start = Position(start.epoch + 1, order=self.name)
        raise DataError(
            f"{epochs_of_nothing} epochs had no document with a token to learn: give more data, or "
            "a higher weight"
        )

    def _of_epoch(self, start: Position) -> Iterator[tuple[Chunk, Position]]:
        """A chunk is given once it is known whether it is the epoch's last."""
        after = Position(start.epoch + 1, order=self.name)
        held = None
        for chunk, position in self._of_groups(start, after):
            if held is not None:
                yield held
            held = chunk, position
        if held is not None:
            yield held[0], after

    def _of_groups(self, start: Position, after_all: Position) -> Iterator[tuple[Chunk, Position]]:
        groups = self.order.groups(start.epoch)
        behind = start.chunk
        for index in range(start.group, len(groups)):
            here = Position(start.epoch, index, 0, self.name)
            is_last = index + 1 == len(groups)
            after = after_all if is_last else replace(here, group=index + 1)
            spans = self._spans(groups[index])
            following = self.order.groups(after.epoch)[:1] if is_last else [groups[index + 1]]
            self.feed.prefetch(block_slice.block for group in following for block_slice in group)
            for chunk, number in self._packed(spans, here, behind):
                yield chunk, replace(here, chunk=number) if number else after
            behind = 0

    def _packed(self, spans: Spans, here: Position, behind: int) -> Iterator[tuple[Chunk, int]]:
        """Chunks of a group, each with how many of it are behind then; 0 after the last."""
        key = (self.order.seed, here.epoch, here.group)
        spans = spans.chosen(shuffled(len(spans.totals), "group", *key))
        bins = pack(spans.totals, self.shape)
        for number, index in enumerate(shuffled(len(bins), "chunks", *key)[behind:], behind + 1):
            yield chunk_of(spans, bins[index], self.shape), number % len(bins)

    def _spans(self, group: list[BlockSlice]) -> Spans:
        self.feed.prefetch(block_slice.block for block_slice in group)
        known = {}
        for block_slice in group:
            if block_slice.block not in known:
                known[block_slice.block] = self._cut(block_slice)
        parts = []
        for block_slice in group:
            spans = known[block_slice.block]
            parts.append(spans.chosen(block_slice.share(len(spans.totals), self.order.seed)))
        return joined(parts)

    def _cut(self, block_slice: BlockSlice) -> Spans:
        block, shape = block_slice.block, self.shape
        tokens = self.feed.take(block)
        self.skipped.add(block, tokens)
        continuous = block.is_continuous
        found = first_too_long(tokens, shape.longest)
        if self.refuse_long and not continuous and found is not None:
            document, length = found
            raise DataError(
                f"{document_place(block, tokens, document)}: {length} tokens, and the longest "
                f"document is {shape.longest}; plan for longer ones, shorten it, or let long ones "
                'be cut (long_documents="cut")'
            )
        sizes = sizes_for(shape.longest, shape.chunk_tokens, is_continuous=continuous)
        return cut(tokens, sizes, shape.sides)


class ChunkStream:
    """An iterator of chunks without end, and where it stands.

    Args:
        chunks: from `start` on, each with the position after it.
        ahead: whether they are made in a thread, some before they are asked for.
        skipped: why rows were left out, which grows.
        feed: of their tokens, to be closed.

    Attributes:
        position: what `TrainingData.chunks` takes to go on after the last chunk given.
        waited_s: seconds in which the caller waited for chunks, after the first.
        first_wait_s: for the first.
        skipped: why rows were left out, so far.
    """

    def __init__(
        self, chunks: Iterator[tuple[Chunk, Position]], start: Position, *, ahead: bool,
        skipped: Sequence[str] = (), feed: TokenFeed | None = None,
    ) -> None:  # fmt: skip
        self.position, self.skipped = start, skipped
        self.waited_s = self.first_wait_s = 0.0
        self._num_tokens = self._num_padding = self._num_chunks = 0
        self._chunks = chunks
        runner = _Ahead(self._chunks) if ahead else None
        if runner is not None:
            self._chunks = iter(runner)
        self._close = weakref.finalize(self, _close_in_order, runner, feed)

    @property
    def fill(self) -> float:
        """Share of the tokens given that are no padding; 1 before the first."""
        return 1 - self._num_padding / self._num_tokens if self._num_tokens else 1.0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        start_s = perf_counter()
        chunk, self.position = next(self._chunks)
        waited_s = perf_counter() - start_s
        if self._num_chunks:
            self.waited_s += waited_s
        else:
            self.first_wait_s = waited_s
        self._num_chunks += 1
        self._num_tokens += len(chunk.ids)
        self._num_padding += chunk.num_padding
        return chunk

    def close(self) -> None:
        """End the processes and the thread; safe to do twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_in_order(runner: "_Ahead | None", feed: TokenFeed | None) -> None:
    if runner is not None:
        runner.stop()
    if feed is not None:
        feed.close()
    if runner is not None:
        runner.join()


class _Ahead:
    """Runs an iterator in a thread, some items ahead of who takes them."""

    def __init__(self, items: Iterator[tuple[Chunk, Position]]) -> None:
        self._ready: queue.Queue[tuple[Chunk, Position] | BaseException] = queue.Queue(
            _READY_CHUNKS
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Chunk, Position]]:
        while not self._stopped.is_set():
            try:
                item = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self, items: Iterator[tuple[Chunk, Position]]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:  # it is the taker's to see
            self._put(error)

    def _put(self, item: tuple[Chunk, Position] | BaseException) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False
