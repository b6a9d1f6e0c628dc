"""A look at some of the data before a run: lengths to plan with, and what would go wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokeniser import BlockTokeniser
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.order import shuffled
from twinstream.data.pieces import Ints, cut
from twinstream.data.reading.blocks import Block

_BLOCKS = 8
_BLOCK_BYTES = 1 << 16  # of each its beginning
_BLOCK_ROWS = 256
_STOP_WITHIN = 8  # tokens: templates put a line end or two after the stop token


@dataclass(frozen=True)
class Sample:
    """Lengths [D] of the pieces of sampled documents, and what a user should know."""

    lengths: Ints
    warnings: tuple[str, ...] = ()


@dataclass
class _Tally:
    num_documents: int = 0
    num_stopped: int = 0
    num_rows: int = 0
    lengths: list[Ints] = field(default_factory=list)


def take_sample(
    blocks: Sequence[Sequence[Block]],
    weights: Sequence[float],
    tokeniser: BlockTokeniser,
    longest: int,
) -> Sample:
    """Tokenise the beginnings of some blocks of each source, more of larger ones.

    Raises:
        DataError: a row cannot be used, or there is nothing to learn in any.
    """
    stops = {*tokeniser.tokenizer.special.stops.values(), *tokeniser.tokenizer.after.tolist()}
    tally = _Tally()
    for block, head, tokens in _looked_at(blocks, weights, tokeniser):
        tally.num_documents += int((np.diff(tokens.ends, prepend=0) > 0).sum())
        lengths = cut(tokens, (longest,)).lengths
        if block.is_continuous and head != block and len(lengths):
            lengths = _as_if_whole(tokens, block, head, longest)
        elif not block.is_continuous:
            found = list(_stopped(tokens, stops))
            tally.num_rows += len(found)
            tally.num_stopped += sum(found)
        tally.lengths.append(lengths)
    lengths = np.concatenate([np.empty(0, np.int64), *tally.lengths])
    if not len(lengths):
        raise DataError(_nothing_learned(tally.num_documents))
    return Sample(lengths, tuple(_stop_warnings(tally, bool(stops))))


def _looked_at(
    blocks: Sequence[Sequence[Block]], weights: Sequence[float], tokeniser: BlockTokeniser
) -> Iterator[tuple[Block, Block, BlockTokens]]:
    """Blocks with what was looked at of them, and its tokens.

    A block in which no line begins, as those in the midst of a very long one, is passed over.
    """
    sizes = [
        sum(block.size_bytes for block in its_blocks) * weight
        for its_blocks, weight in zip(blocks, weights, strict=True)
    ]
    for source, its_blocks in enumerate(blocks):
        count = max(1, round(_BLOCKS * sizes[source] / sum(sizes)))
        found = 0
        for index in shuffled(len(its_blocks), "sample", source):
            block = its_blocks[index]
            for part in (block.head(_BLOCK_BYTES, _BLOCK_ROWS), block):
                tokens = tokeniser.fresh(part)
                if len(tokens.ids):
                    yield block, part, tokens
                    found += 1
                    break
            if found == count:
                break


def _as_if_whole(tokens: BlockTokens, block: Block, head: Block, longest: int) -> Ints:
    """Lengths of pieces of a continuous text of which only the beginning was looked at."""
    whole = len(tokens.ids) * block.size_bytes // head.size_bytes
    size = min(longest, whole)
    return np.full(max(1, round(len(tokens.ids) / size)), size, np.int64)


def _stopped(tokens: BlockTokens, stops: set[int]) -> Iterator[bool]:
    """For each document in which something is learned, whether the stop token is, too."""
    start = 0
    for end in tokens.ends.tolist():
        targets = tokens.ids[start + 1 : end][tokens.learned[start + 1 : end]]
        if len(targets):
            yield not stops.isdisjoint(targets[-_STOP_WITHIN:].tolist())
        start = end


def _stop_warnings(tally: _Tally, has_stops: bool) -> Iterator[str]:
    without = tally.num_rows - tally.num_stopped
    if not without:
        return
    reason = (
        "bytes have none, and a tokenizer names its own as eos_token in tokenizer_config.json"
        if not has_stops
        else "the chat template puts none at the end of what the assistant says, or leaves it out "
        "of {% generation %}"
    )
    yield (
        f"in {without} of {tally.num_rows} sampled documents no end token is learned, so the "
        f"model would not learn to stop: {reason}"
    )


def _nothing_learned(num_documents: int) -> str:
    if not num_documents:
        return "there is no text in the files: each document is empty; give files with text"
    return (
        f"none of {num_documents} sampled documents has a token to learn: with "
        'loss_on="completions" that is what an assistant says, or a completion; check the roles '
        '(`assistant`) and that completions are not empty, or train on everything (loss_on="all")'
    )
