"""A look at some of the data before a run: lengths to plan with, and what would go wrong."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from twinstream.data.chunk_stream import SkippedRows
from twinstream.data.data_error import DataError
from twinstream.data.encoding.block_tokeniser import BlockTokeniser, document_place
from twinstream.data.encoding.block_tokens import BlockTokens
from twinstream.data.encoding.conversation import THOUGHTS
from twinstream.data.encoding.passages import Passage
from twinstream.data.order import shuffled
from twinstream.data.reading.blocks import DataBlock
from twinstream.data.spans import Ints, cut

_BLOCKS = 8
_BLOCK_BYTES = 1 << 16  # of each its beginning
_BLOCK_ROWS = 256
_STOP_WITHIN = 8  # tokens: templates put a line end or two after the stop token


@dataclass(frozen=True)
class Sample:
    """The findings in a sample of the data.

    Attributes:
        lengths: [D], tokens of the pieces of the sampled documents.
        epoch_tokens: of an epoch, about.
        warnings: what a user should know.
    """

    lengths: Ints
    epoch_tokens: int
    warnings: tuple[str, ...] = ()


@dataclass
class _Tally:
    """What is counted on the way; tokens and bytes by source.

    Attributes:
        num_documents: that are not empty, of rows and of texts.
        num_taught: of rows, in which something is learned.
        num_divided: longer ones that become several.
        num_cut: longer ones of which the first tokens are kept.
        num_alike: pairs of which the same is left of both answers.
        num_cut_off: longer ones in which nothing is learned before the cut.
        num_unlearned: in which nothing is learned.
        num_retold: conversations of which each turn is a document.
        left_out: of the template, by what it is, with the place of the first.
        told: of what else was told, by what it is.
    """

    num_sources: int
    sides: int
    num_documents: int = 0
    num_stopped: int = 0
    num_taught: int = 0
    num_divided: int = 0
    num_cut: int = 0
    num_cut_off: int = 0
    num_alike: int = 0
    num_unlearned: int = 0
    num_retold: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    first_places: dict[str, str] = field(default_factory=dict)
    lengths: list[Ints] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = np.zeros(self.num_sources)
        self.bytes = np.zeros(self.num_sources)

    def look_at_rows(
        self, block: DataBlock, tokens: BlockTokens, passages: Sequence[Passage], longest: int
    ) -> None:
        """Count what is cut, and what is not learned."""
        start, before = 0, tokens.ids[:0]
        for document, end in enumerate(tokens.ends.tolist()):
            learned = tokens.learned[start + 1 : end]
            is_long, is_learned = end - start > longest, bool(learned[: longest - 1].any())
            if end > start:
                self.num_unlearned += not learned.any()
                self.num_cut_off += bool(learned.any()) and not is_learned
                self.num_divided += is_long and self.sides == 1 and bool(learned.all())
                is_cut = self.sides > 1 or not learned.all()
                kept = tokens.ids[start:end][:longest]
                is_second = self.sides == 2 and document % 2 == 1
                self.num_alike += is_second and is_learned and np.array_equal(kept, before)
                before = kept
            self.num_cut += is_long and is_learned and is_cut
            left_out, told = passages[document].left_out, passages[document].told
            for what in told if left_out is None else (left_out, *told):
                (self.told if what in told else self.left_out)[what] += 1
                if what not in self.first_places:
                    self.first_places[what] = document_place(block, tokens, document)
            start = end
        if self.sides == 1:
            self.num_retold += int((np.bincount(tokens.rows) > 1).sum())


def take_sample(
    blocks: Sequence[Sequence[DataBlock]],
    weights: Sequence[float],
    tokeniser: BlockTokeniser,
    longest: int,
    skipped: SkippedRows,
    *,
    refuse_long: bool = False,
) -> Sample:
    """Tokenise the beginnings of some blocks of each source, more of larger ones.

    Raises:
        DataError: a row cannot be used, or there is nothing to learn in any.
    """
    stops = {*tokeniser.tokenizer.special.stops.values(), *tokeniser.tokenizer.after.tolist()}
    sizes = np.array([sum(block.size_bytes for block in its_blocks) for its_blocks in blocks])
    epoch_bytes = sizes * np.array(weights)
    counts = np.maximum(1, np.rint(_BLOCKS * epoch_bytes / epoch_bytes.sum())).astype(int)
    tally = _Tally(len(blocks), tokeniser.sides)
    for source, (its_blocks, count) in enumerate(zip(blocks, counts.tolist(), strict=True)):
        for block, head, tokens, passages in _looked_at(its_blocks, source, count, tokeniser):
            skipped.add(block, tokens)
            lengths = _lengths(tokens, block, head, longest, tokeniser.sides)
            tally.tokens[source] += len(tokens.ids) if block.is_continuous else lengths.sum()
            tally.bytes[source] += head.size_bytes
            tally.num_documents += int((np.diff(tokens.ends, prepend=0) > 0).sum())
            tally.lengths.append(lengths)
            if not block.is_continuous:
                tally.look_at_rows(head, tokens, passages, longest)
                found = list(_stopped(tokens, stops))
                tally.num_taught += len(found)
                tally.num_stopped += sum(found)
    lengths = np.concatenate(tally.lengths)
    changed = _changed(tally, longest, refuse_long)
    if not len(lengths):
        raise DataError(_nothing_learned(tally.num_documents, changed))
    epoch_tokens = round(float((epoch_bytes * tally.tokens / tally.bytes).sum()))
    warnings = [*changed, *_stop_warnings(tally, bool(stops))]
    if skipped.problems:
        count = len(skipped.problems)
        warnings.append(f"{count} sampled rows are skipped (skip_bad_rows): {skipped.problems[0]}")
    return Sample(lengths, epoch_tokens, tuple(warnings))


def _looked_at(
    blocks: Sequence[DataBlock], source: int, count: int, tokeniser: BlockTokeniser
) -> Iterator[tuple[DataBlock, DataBlock, BlockTokens, list[Passage]]]:
    """Blocks of a source, what was looked at of each, its tokens, and the texts of its rows.

    A block in which no line begins, as those in the midst of a very long one, is not counted.
    """
    found = 0
    for index in shuffled(len(blocks), "sample", source):
        block = blocks[index]
        tokens, passages = tokeniser.sampled(head := block.head(_BLOCK_BYTES, _BLOCK_ROWS))
        if not len(tokens.ids):
            tokens, passages = tokeniser.sampled(head := block)
        yield block, head, tokens, passages
        found += len(tokens.ids) > 0
        if found == count:
            return


def _lengths(
    tokens: BlockTokens, block: DataBlock, head: DataBlock, longest: int, sides: int
) -> Ints:
    """Of pieces; of a continuous text of which only the beginning was looked at, as if of all."""
    last = len(head.parts) - 1
    if not block.is_continuous or head.parts[last] == block.parts[last]:
        return cut(tokens, (longest,), sides).lengths
    start = int(tokens.ends[last - 1]) if last else 0
    seen = len(tokens.ids) - start
    whole = seen * block.parts[last].size_bytes // head.parts[last].size_bytes
    size = max(1, min(longest, whole))
    before = BlockTokens(
        tokens.ids[:start], tokens.learned[:start], tokens.ends[:last], tokens.rows[:last]
    )
    as_if = np.full(max(1, round(seen / size)) if seen else 0, size, np.int64)
    return np.concatenate([cut(before, (longest,)).lengths, as_if])


def _stopped(tokens: BlockTokens, stops: set[int]) -> Iterator[bool]:
    """For each document in which something is learned, whether the stop token is, too."""
    start = 0
    for end in tokens.ends.tolist():
        targets = tokens.ids[start + 1 : end][tokens.learned[start + 1 : end]]
        if len(targets):
            yield not stops.isdisjoint(targets[-_STOP_WITHIN:].tolist())
        start = end


def _changed(tally: _Tally, longest: int, refuse_long: bool) -> list[str]:
    """One line on what is cut, dropped or trained in another way, if anything is."""
    cut, divided = (0, 0) if refuse_long else (tally.num_cut, tally.num_divided)
    counts = {
        f"cut to their first {longest:,} tokens (--seq-len)": cut,
        f"cut into pieces of {longest:,} tokens (--seq-len)": divided,
        f"left out, as the first {longest:,} tokens, to which longer ones are cut, have nothing to "
        "learn": 0 if refuse_long else tally.num_cut_off,
        "left out, as they have nothing to learn": tally.num_unlearned,
        f"pairs left out, as their answers are the same in the first {longest:,} tokens": (
            tally.num_alike
        ),
        "conversations trained turn by turn, each as it is generated, because the chat template "
        "renders earlier turns differently": tally.num_retold,
    }
    found = [f"{count:,} {what}" for what, count in counts.items() if count]
    for what, count in tally.left_out.items():
        so = "" if what == THOUGHTS else ", which are not learned"
        found.append(
            f"{count:,} in which the chat template leaves out {what} of turns of the assistant{so} "
            f"(first: {tally.first_places[what]})"
        )
    found += [
        f"{count:,} {what} (first: {tally.first_places[what]})"
        for what, count in tally.told.items()
    ]
    return [f"of {tally.num_documents:,} sampled documents: {'; '.join(found)}"] if found else []


def _stop_warnings(tally: _Tally, has_stops: bool) -> Iterator[str]:
    without = tally.num_taught - tally.num_stopped
    if not without:
        return
    reason = (
        "bytes have none, and a tokenizer names its own as eos_token in tokenizer_config.json"
        if not has_stops
        else "the chat template puts none at the end of what the assistant says, or leaves it out "
        "of {% generation %}"
    )
    yield (
        f"in {without} of {tally.num_taught} sampled documents no end token is learned, so the "
        f"model would not learn to stop: {reason}"
    )


def _nothing_learned(num_documents: int, changed: Sequence[str]) -> str:
    if not num_documents:
        return "there is no text in the files: each document is empty; give files with text"
    return (
        f"none of {num_documents} sampled documents has a token to learn ({'; '.join(changed)}): "
        'with loss_on="completions" that is what an assistant says, or a completion; check the '
        "roles (`assistant`) and that completions are not empty, give a larger --seq-len or "
        'another chat template, or train on everything (loss_on="all")'
    )
