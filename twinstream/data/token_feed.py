"""Tokens of blocks, made in processes beside the training or in the caller's own."""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol

from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokeniser import BlockTokeniser, Encoding
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.reading.blocks import Block
from twinstream.schedule.worker_processes import (
    WorkerContext,
    end_with_parent,
    ignore_interrupts,
)


class TokenFeed(Protocol):
    """Gives the tokens of blocks, which may be asked for ahead of need."""

    def ask(self, blocks: Iterable[Block]) -> None:
        """These will be taken; each is made once, however often it is asked for until then."""

    def take(self, block: Block) -> BlockTokens:
        """Raises DataError if it cannot be made."""

    def close(self) -> None:
        """Nothing more will be taken."""


class InlineTokenFeed:
    """Makes tokens when they are taken."""

    def __init__(self, tokeniser: BlockTokeniser) -> None:
        self._tokeniser = tokeniser

    def ask(self, blocks: Iterable[Block]) -> None:
        pass

    def take(self, block: Block) -> BlockTokens:
        return self._tokeniser.tokens(block)

    def close(self) -> None:
        pass


class ProcessTokenFeed:
    """Makes tokens in processes of its own, in the order they are asked for.

    The processes end with this one, even if it is killed.
    """

    def __init__(self, encoding: Encoding, cache: Path | None, num_workers: int) -> None:
        self._pool = ProcessPoolExecutor(
            num_workers, WorkerContext(), initializer=_begin, initargs=(encoding, cache)
        )
        self._asked: dict[Block, Future[BlockTokens]] = {}

    def ask(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block not in self._asked:
                self._asked[block] = self._submit(block)

    def take(self, block: Block) -> BlockTokens:
        future = self._asked.pop(block, None) or self._submit(block)
        try:
            return future.result()
        except DataError as error:
            raise error from None  # without the other process's traceback
        except BrokenProcessPool:
            raise _died() from None

    def close(self) -> None:
        self._asked.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, block: Block) -> Future[BlockTokens]:
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
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each process
    _TOKENISERS[:] = [BlockTokeniser(encoding, cache)]


def _tokens(block: Block) -> BlockTokens:
    return _TOKENISERS[0].tokens(block)
