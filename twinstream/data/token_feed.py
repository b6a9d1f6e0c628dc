"""Make the tokens of blocks in processes beside the training, or in the caller's own."""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol

from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokeniser import BlockTokeniser, Encoding
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.reading.blocks import DataBlock
from twinstream.schedule.worker_processes import (
    WorkerContext,
    ignore_interrupts,
)


class TokenFeed(Protocol):
    """Gives the tokens of blocks, which may be prefetched."""

    def prefetch(self, blocks: Iterable[DataBlock]) -> None:
        """Start making the tokens of blocks that will be taken; each is made once until then."""

    def take(self, block: DataBlock) -> BlockTokens:
        """Return the tokens of a block; raises DataError if they cannot be made."""

    def close(self) -> None:
        """End the feed; nothing more will be taken from it."""


class InlineTokenFeed:
    """Makes tokens in the caller's process, when they are taken."""

    def __init__(self, tokeniser: BlockTokeniser) -> None:
        self._tokeniser = tokeniser

    def prefetch(self, blocks: Iterable[DataBlock]) -> None:
        pass

    def take(self, block: DataBlock) -> BlockTokens:
        return self._tokeniser.tokens(block)

    def close(self) -> None:
        pass


class ProcessTokenFeed:
    """Makes tokens in processes of its own, in the order in which they are prefetched.

    The processes end with this one, even if it is killed.
    """

    def __init__(self, encoding: Encoding, cache: Path | None, num_workers: int) -> None:
        self._pool = ProcessPoolExecutor(
            num_workers, WorkerContext(), initializer=_begin, initargs=(encoding, cache)
        )
        self._pending: dict[DataBlock, Future[BlockTokens]] = {}

    def prefetch(self, blocks: Iterable[DataBlock]) -> None:
        for block in blocks:
            if block not in self._pending:
                self._pending[block] = self._submit(block)

    def take(self, block: DataBlock) -> BlockTokens:
        future = self._pending.pop(block, None) or self._submit(block)
        try:
            return future.result()
        except DataError as error:
            raise error from None  # without the other process's traceback
        except BrokenProcessPool:
            raise _died() from None

    def close(self) -> None:
        self._pending.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, block: DataBlock) -> Future[BlockTokens]:
        try:
            return self._pool.submit(_tokens, block)
        except BrokenProcessPool:
            raise _died() from None


def _died() -> DataError:
    return DataError(
        "a process that tokenises died, probably because memory ran out: use fewer workers"
    )


_TOKENISERS: list[BlockTokeniser] = []  # of a worker process, which gets it when it begins


def _begin(encoding: Encoding, cache: Path | None) -> None:
    ignore_interrupts()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each process
    _TOKENISERS[:] = [BlockTokeniser(encoding, cache)]


def _tokens(block: DataBlock) -> BlockTokens:
    return _TOKENISERS[0].tokens(block)
